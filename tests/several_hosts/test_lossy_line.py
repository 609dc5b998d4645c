# SPDX-License-Identifier: Apache-2.0
"""Where a line loses packets, BBR is asked for, and more connections are opened where the system refuses it."""

import json
import os
import subprocess
import sys
from typing import Any

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
import bagua
from bagua.info.connections import connections

dist.init_process_group("bagua")
handle = bagua.register_comm_hook(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8)), "bytegrad")
for _ in range(4):
    dist.all_reduce(torch.ones(1 << 20))
sent = [one.congestion for one in connections().values() if one.segments > 100]
everybody = [None, None]
dist.all_gather_object(everybody, (sent, handle.stats()["line"]))
if dist.get_rank() == 0:
    print(json.dumps(everybody))
dist.destroy_process_group()
"""


def _seen(congestion: tuple[str, ...], most: int) -> list[tuple[list[str], dict[str, Any]]]:
    """Return by rank the congestion control of every connection that carried data, and what the statistics say."""
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
    for sent, line in _seen(("cubic", "bbr"), most):
        assert set(sent) == {"bbr"}
        assert "bbr" in line["congestion"]


def test_losses_bring_connections_where_there_is_only_cubic() -> None:
    for sent, line in _seen(("cubic",), 32):
        assert set(sent) == {"cubic"}
        assert len(sent) > WITHOUT_LOSSES
        assert line["congestion"] == ["cubic"]
        assert line["connections"] >= len(sent)
        assert 0.003 < line["resent_share"] < 0.1
        assert 0.03 <= line["least_round_trip"] <= line["round_trip"] < 1
