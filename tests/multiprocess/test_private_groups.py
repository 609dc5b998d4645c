# SPDX-License-Identifier: Apache-2.0
"""Groups that bagua makes for itself end with what they were made for: no thread of theirs stays."""

import gc

import bagua
import pytest
import torch
import torch.distributed as dist
from holdings import holdings, left_behind
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

_CYCLES = 2


def _train(group: dist.ProcessGroup, algorithm: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = bagua.register_comm_hook(model, algorithm, optimizer=optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if algorithm == "async":
        handle.abort()


def _use(group: dist.ProcessGroup, use: str) -> None:
    if use == "compressed":
        bagua.compressed.all_reduce(torch.ones(300), group=group)
    else:
        _train(group, use)


@pytest.mark.parametrize(
    ("backend", "use"),
    [
        ("gloo", "bytegrad"),
        ("gloo", "async"),
        ("bagua", "async"),
        ("gloo", "compressed"),
    ],
)
@on_ranks(2)
def test_nothing_stays_of_a_private_group(backend: str, use: str) -> None:
    before = None
    for cycle in range(1 + _CYCLES):
        group = dist.new_group(backend=backend)
        assert isinstance(group, dist.ProcessGroup)
        _use(group, use)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()
        if cycle == 0:
            # The default group has its threads now.
            before = holdings()
    assert before is not None
    assert not left_behind(before)
