# SPDX-License-Identifier: Apache-2.0
"""Groups of some of the ranks, and groups beside each other."""

import inspect
import itertools
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_new_ranks, on_ranks, run_ranks

pytestmark = pytest.mark.any_device
_needs_cpu_split = pytest.mark.skipif(
    'torch.device("cuda")' in inspect.getsource(dist.split_group),
    reason=f"torch {torch.__version__} splits only groups that are bound to an accelerator",
)


def _sum_over(group: dist.ProcessGroup | None, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@on_ranks(4)
def test_group_of_every_subset_of_ranks() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in range(1, size + 1):
        for members in itertools.combinations(range(size), count):
            group: Any = dist.new_group(list(members))
            if rank in members:
                assert dist.get_group_rank(group, rank) == members.index(rank)
                assert dist.get_process_group_ranks(group) == list(members)
                assert _sum_over(group, float(rank)) == sum(members)
                tensor = torch.tensor([float(rank)])
                dist.broadcast(tensor, src=members[-1], group=group)
                assert tensor.item() == members[-1]
                dist.destroy_process_group(group)
    assert _sum_over(None, 1.0) == size


@pytest.mark.cpu_only("NCCL wants communicators to be made in the same order on all ranks")
@on_ranks("peers")
def test_two_groups_used_in_opposite_orders() -> None:
    """Groups do not wait for each other: ranks may issue on two of them in opposite orders."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups: list[Any] = [dist.new_group(list(range(size))) for _ in range(2)]
    tensors = [torch.full((1000,), float(rank + 1)), torch.full((1000,), float(10 * (rank + 1)))]
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    works: list[Any] = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for work in works:
        work.wait()
    total = size * (size + 1) / 2
    assert (tensors[0] == total).all()
    assert (tensors[1] == 10 * total).all()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.cpu_only("torch splits groups of an accelerator only where they are bound to it")
@_needs_cpu_split
@on_ranks(4)
def test_split_group() -> None:
    rank = dist.get_rank()
    own: Any = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    before = own._timeout, own.group_name
    child: Any = dist.split_group(split_ranks=[[0, 2], [1, 3]], timeout=timedelta(seconds=20))
    assert child is not None
    assert dist.get_process_group_ranks(child) == [rank % 2, rank % 2 + 2]
    assert _sum_over(child, float(rank)) == 2 * (rank % 2) + 2
    grandchild: Any = dist.split_group(parent_pg=child, split_ranks=[[0], [1]])
    assert _sum_over(grandchild, float(rank)) == rank
    assert _sum_over(None, 1.0) == 4
    dist.destroy_process_group(grandchild)
    dist.destroy_process_group(child)
    # Some ranks may be left out.
    three: Any = dist.split_group(split_ranks=[[0, 1, 2]])
    if rank < 3:
        assert _sum_over(three, 1.0) == 3
        dist.destroy_process_group(three)
    assert _sum_over(None, 1.0) == 4
    assert (own._timeout, own.group_name) == before


@_needs_cpu_split
@on_new_ranks(2)
def test_a_split_finds_the_ranks_that_are_there_on_a_store_that_has_seen_others(tmp_path: Path) -> None:
    """torchrun starts ranks again with the store of the former ones, and groups have the same names then."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(f"{tmp_path}/store", 2)  # type: ignore[attr-defined]
    for attempt in range(2):
        dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        # The second time rank 0 finds what rank 1 has written the first time.
        time.sleep(1.0 if attempt == 1 and rank == 1 else 0)
        both: Any = dist.split_group(split_ranks=[[0, 1]], timeout=timedelta(seconds=20))
        assert _sum_over(both, 1.0) == 2
        dist.destroy_process_group()


def _initialise_again(folder: str) -> None:
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    for turn in range(3):
        assert _sum_over(None, 1.0) == size
        dist.destroy_process_group()
        with pytest.raises((RuntimeError, ValueError), match="process group"):
            dist.all_reduce(torch.ones(3))
        store = dist.FileStore(os.path.join(folder, f"store-{turn}"), size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    assert _sum_over(None, 1.0) == size


@pytest.mark.parametrize("size", [1, 3])
def test_a_destroyed_default_group_refuses_operations_until_it_is_initialised_again(
    request: pytest.FixtureRequest, tmp_path: object, size: int
) -> None:
    run_ranks(size, _initialise_again, str(tmp_path), backend=request.config.getoption("--backend"))
