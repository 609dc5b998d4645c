# SPDX-License-Identifier: Apache-2.0
"""Where a line loses packets, BBR is asked for, and more connections are opened where the system refuses it."""

import json
import os
import subprocess
import sys

import pytest
from bagua.bench.emulated_hosts import Network
from two_hosts import hosts_over

# Ranks import torch, on cores that others use too.
SECONDS = 120
# So many hold what is on its way; more are opened only for losses.
WITHOUT_LOSSES = 8
RANK = """
import json
import torch
import torch.distributed as dist
from bagua.info.connections import connections

dist.init_process_group("bagua")
for _ in range(4):
    dist.all_reduce(torch.ones(1 << 20))
sent = [one.congestion for one in connections().values() if one.segments > 100]
everybody = [None, None]
dist.all_gather_object(everybody, sent)
if dist.get_rank() == 0:
    print(json.dumps(everybody))
dist.destroy_process_group()
"""


def _connections(congestion: tuple[str, ...], most: int) -> list[list[str]]:
    """Return the congestion control of every connection that carried data, by the rank that sent."""
    with hosts_over(Network(500e6, 0.03, 0.01, buffer=0.05, congestion=congestion)) as hosts:
        ranks = []
        for rank, host in enumerate(hosts):
            meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": "2"}
            own = {**os.environ, **host.environment(), **meeting, "BAGUA_SOCKET_CONNECTIONS": str(most)}
            command = host.command([sys.executable, "-c", RANK])
            ranks.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
        try:
            text = ranks[0].communicate(timeout=SECONDS)[0]
            assert [rank.wait(timeout=SECONDS) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return json.loads(text)


@pytest.mark.parametrize("most", [1, 32])
def test_losses_bring_bbr_where_the_system_allows_it(most: int) -> None:
    for sent in _connections(("cubic", "bbr"), most):
        assert set(sent) == {"bbr"}


def test_losses_bring_connections_where_there_is_only_cubic() -> None:
    for sent in _connections(("cubic",), 32):
        assert set(sent) == {"cubic"}
        assert len(sent) > WITHOUT_LOSSES
