# SPDX-License-Identifier: Apache-2.0
"""Asynchronous work, its futures, and several operations issued as one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import settle
from ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.any_device


def _calls() -> dict[str, tuple[list[Any], Callable[[], Tensor], Tensor]]:
    """By collective: its arguments, how to read its result on this rank, and what it has to be. They share tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, total = torch.full((7,), float(rank)), float(sum(range(size)))
    everyone = torch.arange(float(size)).repeat_interleave(7)
    parts = [torch.full((7,), float(rank)) for _ in range(size)]
    outputs = [torch.empty(7) for _ in range(size)]
    joined, single = torch.empty(7 * size), torch.empty(7)
    on_root = rank == 0
    return {
        "all_reduce": ([mine], lambda: mine, torch.full((7,), total)),
        "broadcast": ([mine, size - 1], lambda: mine, torch.full((7,), size - 1.0)),
        "reduce": ([mine, 0], lambda: mine if on_root else torch.zeros(7), torch.full((7,), total if on_root else 0.0)),
        "all_gather": ([outputs, mine], lambda: torch.cat(outputs), everyone),
        "all_gather_into_tensor": ([joined, mine], lambda: joined, everyone),
        "gather": (
            [mine, outputs if on_root else None],
            lambda: torch.cat(outputs) if on_root else everyone,
            everyone,
        ),
        "scatter": ([single, parts if on_root else None], lambda: single, torch.zeros(7)),
        "reduce_scatter": ([single, parts], lambda: single, torch.full((7,), total)),
        "reduce_scatter_tensor": ([single, torch.cat(parts)], lambda: single, torch.full((7,), total)),
        "all_to_all": ([outputs, parts], lambda: torch.cat(outputs), everyone),
        "all_to_all_single": ([joined, torch.cat(parts)], lambda: joined, everyone),
    }


@on_ranks("ranks")
def test_async_collectives_have_their_results_after_wait_and_for_continuations_of_their_futures() -> None:
    for name in _calls():
        arguments, result, expected = _calls()[name]
        work = getattr(dist, name)(*arguments, async_op=True)
        assert work.wait()
        settle()
        assert work.is_completed()
        assert work.is_success()
        assert torch.equal(result(), expected), name
        arguments, result, expected = _calls()[name]
        future = getattr(dist, name)(*arguments, async_op=True).get_future()
        seen = future.then(lambda done, result=result: (done.value(), result().clone())).wait()
        assert torch.equal(seen[1], expected), name
        assert isinstance(seen[0], list)
        if name == "all_reduce":
            assert torch.equal(seen[0][0], expected)


@on_ranks("ranks")
def test_work_and_tensor_may_be_dropped_before_they_are_done() -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks("ranks")
def test_a_tensor_that_is_coalesced_twice_is_reduced_once() -> None:
    total = sum(range(1, dist.get_world_size() + 1))
    own = dist.get_rank() + 1.0
    twice = torch.full((5,), own)
    dist.all_reduce_coalesced([twice, torch.ones(3), twice])
    assert twice.tolist() == [total] * 5
    # In part: a view of the first half, and what it is a view of.
    whole = torch.full((6,), own)
    dist.all_reduce_coalesced([whole[:3], whole, torch.ones(2)])
    assert whole.tolist() == [total] * 6
    grouped = torch.full((4,), own)
    with dist._coalescing_manager():
        dist.all_reduce(grouped)
        dist.all_reduce(grouped)
    assert grouped.tolist() == [total] * 4
