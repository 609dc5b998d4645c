# SPDX-License-Identifier: Apache-2.0
"""Collectives through torch.distributed, against plain references, with one to four ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from reference import DTYPES, OPERATIONS, REFUSED, assert_reduced, dtypes_of, for_each, named, reduce_op, values
from torch import Tensor

pytestmark = pytest.mark.any_device

# Odd lengths and one above any piece size that divides work; none is a multiple of three.
SHAPES: list[tuple[int, ...]] = [(), (1,), (37,), (5, 2, 11)]

for_every_operation = pytest.mark.parametrize("op", OPERATIONS)


def _from_all(dtype: torch.dtype, shape: tuple[int, ...], op: str = "SUM") -> list[Tensor]:
    return [values(dtype, shape, rank, op) for rank in range(dist.get_world_size())]


def _exactly(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@for_every_operation
@on_ranks("ranks")
def test_all_reduce(op: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, shape in itertools.product(dtypes_of(op), SHAPES):
        if op == "PRODUCT" and dtype.is_complex:  # torch.distributed itself refuses it
            continue
        inputs = _from_all(dtype, shape, op)
        everywhere, somewhere = inputs[rank].clone(), inputs[rank].clone()
        dist.all_reduce(everywhere, reduce_op(op))
        dist.reduce(somewhere, size - 1, reduce_op(op))
        with named(dtype, shape):
            assert_reduced(everywhere, inputs, op)
            if rank == size - 1:
                assert_reduced(somewhere, inputs, op)


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
@on_ranks("ranks")
def test_all_reduce_keeps_non_finite_values(op: str) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensor = torch.ones(5)
    if rank == last:
        tensor[1:4] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    dist.all_reduce(tensor, reduce_op(op))
    assert tensor.isfinite().tolist() == [True, False, False, False, True]
    assert tensor[1].isnan()
    assert tensor[2] == float("inf")
    assert tensor[3] == float("-inf")


@on_ranks("ranks")
def test_meaningless_reductions_raise_and_leave_the_group_usable() -> None:
    for op, dtype in REFUSED:
        with named(op, dtype), pytest.raises((RuntimeError, ValueError, TypeError), match=f"(?i){op}|reduc"):
            dist.all_reduce(torch.ones(3, dtype=dtype), reduce_op(op))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [dist.get_world_size()] * 3


@for_every_operation
@on_ranks("ranks")
def test_reduce_scatter(op: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, shape in itertools.product(dtypes_of(op), [(1,), (5, 2, 11)]):
        # inputs[i][j] goes from rank i to rank j.
        inputs = [[values(dtype, shape, size * i + j, op) for j in range(size)] for i in range(size)]
        mine = [inputs[i][rank] for i in range(size)]
        output = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter(output, inputs[rank], reduce_op(op))
        with named(dtype, shape):
            assert_reduced(output, mine, op)
        for joined in (torch.cat(inputs[rank]), torch.stack(inputs[rank])):
            output = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter_tensor(output, joined, reduce_op(op))
            with named(dtype, shape, "in one tensor"):
                assert_reduced(output, mine, op)


@pytest.mark.parametrize("factor", [0.5, [0.25]], ids=["number", "tensor"])
@on_ranks("ranks")
def test_summands_are_multiplied_before_they_are_reduced(factor: float | list[float]) -> None:
    """PREMUL_SUM: each rank's summand is multiplied by that rank's factor first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = factor if isinstance(factor, float) else torch.tensor(factor)
    op = dist._make_nccl_premul_sum(own)  # type: ignore[attr-defined]
    number = factor if isinstance(factor, float) else factor[0]
    inputs = [values(torch.float32, (size, 5), one) for one in range(size)]
    expected = number * torch.stack(inputs).sum(0)  # a power of two: nothing rounds
    everywhere, somewhere = inputs[rank].clone(), inputs[rank].clone()
    dist.all_reduce(everywhere, op)
    _exactly(everywhere, expected)
    dist.reduce(somewhere, size - 1, op)
    _exactly(somewhere, expected if rank == size - 1 else inputs[rank])
    part = torch.empty(5)
    dist.reduce_scatter_tensor(part, inputs[rank], op)
    _exactly(part, expected[rank])
    dist.reduce_scatter(part.zero_(), list(inputs[rank]), op)
    _exactly(part, expected[rank])


@on_ranks("ranks")
@for_each(DTYPES)
def test_all_gather(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in [(1,), (37,), (5, 2, 11)]:
        inputs = _from_all(dtype, shape)
        outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, inputs[rank])
        for output, expected in zip(outputs, inputs, strict=True):
            _exactly(output, expected)
        for expected in (torch.cat(inputs), torch.stack(inputs)):
            joined = torch.empty_like(expected)
            dist.all_gather_into_tensor(joined, inputs[rank])
            _exactly(joined, expected)


@on_ranks("ranks")
@for_each(DTYPES)
def test_all_to_all(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [[values(dtype, (3, 5), size * i + j) for j in range(size)] for i in range(size)]
    expected = [inputs[i][rank] for i in range(size)]
    outputs = [torch.empty((3, 5), dtype=dtype) for _ in range(size)]
    dist.all_to_all(outputs, inputs[rank])
    _exactly(torch.stack(outputs), torch.stack(expected))
    output = torch.empty((3 * size, 5), dtype=dtype)
    dist.all_to_all_single(output, torch.cat(inputs[rank]))
    _exactly(output, torch.cat(expected))


@on_ranks("ranks")
def test_empty_tensors_pass_through_every_collective() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, size - 1)
    dist.reduce(empty, 0)
    dist.all_gather([torch.empty(0, 3) for _ in range(size)], empty)
    dist.all_gather_into_tensor(torch.empty(0, 3), empty)
    dist.gather(empty, [torch.empty(0, 3) for _ in range(size)] if rank == 0 else None)
    dist.scatter(torch.empty(0, 3), [empty] * size if rank == 0 else None)
    dist.reduce_scatter(torch.empty(0, 3), [empty] * size)
    dist.reduce_scatter_tensor(torch.empty(0, 3), empty)
    dist.all_to_all([torch.empty(0, 3) for _ in range(size)], [empty] * size)
    dist.all_to_all_single(torch.empty(0, 3), empty)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size, size]


def _of_any_strides(value: float, *shape: int) -> list[Tensor]:
    """The same numbers in several kinds of tensors, none of them dense."""
    plain = torch.arange(float(shape[0] * shape[1])).reshape(shape) + value
    wide = torch.zeros(shape[0], 2 * shape[1])
    wide[:, ::2] = plain
    column = plain[:, :1].expand(shape)
    return [plain.t().contiguous().t(), wide[:, ::2], column]


@on_ranks("peers")
def test_inputs_may_have_any_strides() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for kind in range(3):
        everyone = [_of_any_strides(other, 6, 4)[kind] for other in range(size)]
        mine, outputs = everyone[rank], [torch.zeros(6, 4) for _ in range(size)]
        assert not mine.is_contiguous()
        joined, single = torch.zeros(6 * size, 4), torch.zeros(6, 4)

        dist.all_gather(outputs, mine)
        assert torch.equal(torch.cat(outputs), torch.cat(everyone))
        dist.all_gather_into_tensor(joined, mine)
        assert torch.equal(joined, torch.cat(everyone))
        dist.gather(mine, outputs if rank == 0 else None)
        assert torch.equal(torch.cat(outputs), torch.cat(everyone))
        dist.scatter(single, everyone if rank == 0 else None)
        assert torch.equal(single, mine)
        dist.reduce_scatter(single, [mine] * size)
        assert torch.equal(single, torch.stack(everyone).sum(0))
        dist.all_to_all(outputs, [mine] * size)
        assert torch.equal(torch.cat(outputs), torch.cat(everyone))

        parts = _of_any_strides(rank, 6 * size, 4)[kind]
        dist.all_to_all_single(joined, parts)
        expected = [_of_any_strides(other, 6 * size, 4)[kind][6 * rank : 6 * rank + 6] for other in range(size)]
        assert torch.equal(joined, torch.cat(expected))
        dist.reduce_scatter_tensor(single, parts)
        assert torch.equal(single, torch.stack(expected).sum(0))
