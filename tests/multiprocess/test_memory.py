# SPDX-License-Identifier: Apache-2.0
"""What a process grows by in many steps between two hosts, against what it is told."""

import bagua
import pytest
import torch
from devices import here, randn
from holdings import resident_bytes
from hooked_models import emulated_hosts
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.skipif(here(torch.zeros(1)).is_cuda, reason="the memory of the process is that of CPU tensors"),
]


def _growth(algorithm: str, options: dict[str, int], steps: int) -> tuple[float, float]:
    """What this process has grown by in so many steps, and what stats() says, in copies of the weights."""
    with emulated_hosts("AB") as group:
        ddp = DDP(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12))), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
        batch = randn(1, 1024, seed=1)

        def step() -> None:
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()

        with ddp.no_sync():
            step()
        before = resident_bytes()
        handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
        for _ in range(steps):
            step()
        weights = sum(p.nbytes for p in ddp.parameters())
        return (resident_bytes() - before) / weights, sum(handle.stats()["memory"].values()) / weights


def test_rounds_hold_no_more_memory_than_is_told() -> None:
    for grown, told in run_ranks(
        2, _growth, "diloco", {"sync_every": 4, "fragments": 4, "delay": 0}, 64, timeout=120.0
    ):
        assert told == 2.25
        # Beside it there is what the exchange of a fragment takes, what the allocator keeps of that, and 20 MB for any
        # model: 3 to 4 in all. A thread for each of sixteen fragments in turn would keep six.
        assert grown < told + 2.25


def test_exchanges_share_their_memory_whatever_threads_they_run_on() -> None:
    for grown, _ in run_ranks(2, _growth, "gradient_allreduce", {}, 24, timeout=120.0):
        # Torch's buckets, what comes from the other host, and what the allocator keeps: 5 to 7. When sixteen threads
        # had memory of their own it was 32.
        assert grown < 12
