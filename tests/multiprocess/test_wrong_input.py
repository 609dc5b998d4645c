# SPDX-License-Identifier: Apache-2.0
"""Wrong input leaves the group usable; backend/process_group/wrong_arguments_test.cpp has what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, on_ranks
from reference import named
from torch import Tensor

# What torch.distributed, and below it the backend, may raise for an argument.
ARGUMENT_ERRORS = (ValueError, TypeError, RuntimeError, IndexError)


def _like_ranks(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype) for _ in range(count)]


# torch.distributed refuses these itself; what matters is that the group is not harmed.
REFUSED_BY_TORCH: list[Callable[[int], Any]] = [
    lambda size: dist.all_gather(_like_ranks(size, 3, dtype=torch.float64), torch.ones(3)),
    lambda size: dist.all_to_all_single(torch.ones(size, dtype=torch.int64), torch.ones(size)),
    lambda size: dist.reduce_scatter(torch.ones(3), _like_ranks(size, 3, dtype=torch.int32)),
    lambda size: dist.all_reduce([1.0, 2.0]),  # type: ignore[call-overload]
    lambda size: dist.send(torch.ones(3), dist.get_rank()),
]


def _assert_usable() -> None:
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(dist.get_world_size()))] * 3


@on_ranks("ranks")
def test_what_torch_refuses_does_not_harm_the_group() -> None:
    for case, refused in enumerate(REFUSED_BY_TORCH):
        with named(case):
            with pytest.raises(ARGUMENT_ERRORS):
                refused(dist.get_world_size())
            _assert_usable()


@on_ranks(3)
def test_wrong_call_on_one_rank_does_not_disturb_the_others() -> None:
    rank, wrong, received = dist.get_rank(), torch.ones(4, 6).t(), torch.zeros(3)
    for is_asynchronous in (False, True):
        if rank == 1:
            with pytest.raises(ValueError, match="bagua:all_reduce on rank 1 of 3: tensor must be contiguous"):
                dist.all_reduce(wrong, async_op=is_asynchronous)
        _assert_usable()
    # Nothing leaves of a message that is refused, and no receive stays that would take the next message.
    for call in [lambda: dist.send(wrong, 0), lambda: dist.recv(wrong, 0), lambda: dist.recv(wrong)] * (rank == 1):
        with pytest.raises(ValueError, match=r"bagua:(send|recv)\w* on rank 1 of 3: tensor must be contiguous"):
            call()
    if rank < 2:
        dist.send(torch.full((3,), 1.0 + rank), 1 - rank)
        dist.recv(received, 1 - rank)
        assert received.tolist() == [2.0 - rank] * 3


@on_ranks("peers")
def test_a_wrong_list_on_the_root_is_refused_on_all_ranks() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    root, plain = size - 1, torch.ones(3)
    # The lists: one too short, of another size, of another dtype. The empty tensors have nothing to wait for.
    for tensor in (plain, torch.ones(0)):
        for wrong in ([tensor] * (size - 1), [torch.ones(7)] * size, [tensor.double()] * size):
            calls: list[Callable[[], Any]] = [
                lambda tensor=tensor, wrong=wrong: dist.group.WORLD.scatter(  # type: ignore[misc]
                    [tensor.clone()], [wrong] if rank == root else [], _rooted(dist.ScatterOptions(), root)
                ),
                lambda tensor=tensor, wrong=wrong: dist.group.WORLD.gather(  # type: ignore[misc]
                    [wrong] if rank == root else [], [tensor], _rooted(dist.GatherOptions(), root)
                ),
            ]
            for call in calls:
                with pytest.raises(ARGUMENT_ERRORS) as caught:
                    call().wait()
                if rank != root:
                    assert f"rank {root} has refused its own arguments" in str(caught.value)
                # At the next call, and though the refusal is not the last one under way.
                _assert_usable()


def _rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


@on_ranks("peers")
def test_a_wrong_output_of_a_scatter_is_refused_on_all_ranks_by_its_root_and_else_on_its_own() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for root, odd in ((size - 1, size - 1), (size - 1, 0), (0, size - 1)):
        output = torch.zeros(6)[::2] if rank == odd else torch.zeros(3)
        parts = [torch.full((3,), 1.0 + peer) for peer in range(size)] if rank == root else None
        if rank == odd:
            with pytest.raises(ARGUMENT_ERRORS, match=r"output must be contiguous, got sizes \[3\] with strides \[2\]"):
                dist.scatter(output, parts, src=root)
            assert not output.any()
        elif root == odd:
            with pytest.raises(RuntimeError, match=f"rank {root} has refused its own arguments"):
                dist.scatter(output, parts, src=root)
            assert not output.any()
        else:
            dist.scatter(output, parts, src=root)
            assert output.tolist() == [1.0 + rank] * 3
        _assert_usable()


@pytest.mark.parametrize("hosts", ["aba", pytest.param("abc", marks=pytest.mark.long)])
def test_both_keep_a_group_of_several_hosts_usable(hosts: str) -> None:
    with RankPool(3, env={"BAGUA_HOST_ID": list(hosts)}) as pool:
        pool.run(test_a_wrong_list_on_the_root_is_refused_on_all_ranks)
        pool.run(test_a_wrong_output_of_a_scatter_is_refused_on_all_ranks_by_its_root_and_else_on_its_own)


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "gather_into_tensor"), reason="this torch has no gather_into_tensor")
@on_ranks(3)
def test_a_wrong_output_of_gather_into_tensor_is_refused_on_all_ranks() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    root, part = size - 1, torch.ones(3)
    for output in (torch.zeros(3 * size - 1), torch.zeros(6 * size)[::2], torch.zeros(3 * size).double()):
        options = _rooted(dist.GatherOptions(), root)
        with pytest.raises(ARGUMENT_ERRORS) as caught:
            dist.group.WORLD.gather_into_tensor(  # type: ignore[union-attr]
                output if rank == root else torch.empty(0), part, options
            ).wait()
        if rank != root:
            assert f"rank {root} has refused its own arguments" in str(caught.value)
        _assert_usable()
