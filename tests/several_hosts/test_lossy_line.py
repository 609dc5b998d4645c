# SPDX-License-Identifier: Apache-2.0
"""Where a line loses packets, BBR is asked for, and more connections are opened where the system refuses it."""

from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua.bench.emulated_hosts import Network
from bagua.info.connections import connections
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP
from two_hosts import hosts_over

# So many hold what is on its way; more are opened only for losses.
WITHOUT_LOSSES = 8


def _exchange() -> tuple[list[str], dict[str, Any]]:
    """Return the congestion control of every connection that carried data, and what the statistics say."""
    handle = bagua.register_comm_hook(DDP(torch.nn.Linear(8, 8)), "bytegrad")
    for _ in range(4):
        dist.all_reduce(torch.ones(1 << 20))
    return [one.congestion for one in connections().values() if one.segments > 100], handle.stats()["line"]


def _seen(congestion: tuple[str, ...], most: int) -> list[tuple[list[str], dict[str, Any]]]:
    with hosts_over(Network(500e6, 0.03, 0.01, buffer=0.05, congestion=congestion)) as hosts:
        return run_ranks(2, _exchange, env={"BAGUA_SOCKET_CONNECTIONS": str(most)}, hosts=hosts)


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
