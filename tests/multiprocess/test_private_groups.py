# SPDX-License-Identifier: Apache-2.0
"""Groups that bagua makes for itself end with what they were made for: no thread of theirs stays."""

import gc
from types import SimpleNamespace
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._states import StatesOfAllRanks
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
    elif use == "states":
        handle: Any = SimpleNamespace(algorithm="bytegrad", state_dict=lambda: torch.full((10**6,), group.rank()))
        states = StatesOfAllRanks(handle, None, group).state_dict()["ranks"]
        assert [state["handle"].unique().tolist() for state in states] == ([[0], [1]] if group.rank() == 0 else [])
    else:
        _train(group, use)


@pytest.mark.parametrize(
    ("backend", "use"),
    [
        ("gloo", "bytegrad"),
        ("gloo", "async"),
        ("bagua", "async"),
        ("gloo", "compressed"),
        # It takes no CPU tensors, as stock NCCL's, and torch would gather the states on a GPU.
        ("cuda:gloo", "states"),
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
