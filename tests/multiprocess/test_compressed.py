# SPDX-License-Identifier: Apache-2.0
"""bagua.compressed: values against the definition of the default codec; arguments, groups and mismatches."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua import compressed
from devices import here, randn
from ranks import Pools, on_new_ranks, on_ranks
from reference import named
from test_bytegrad_definition import coded, defined_result
from torch import Tensor

pytestmark = pytest.mark.any_device

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Fewer elements than ranks, multiples of nothing, several pieces on the way.
LENGTHS = [1, 2, 97, 20_011, 1_200_011]


def _given(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.device("cpu"):
        return here((randn(length, seed=31 * rank + length) + 0.3 * rank).to(dtype))


def _all_given(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [_given(rank, length, dtype) for rank in range(dist.get_world_size())]


def _check_values(group: dist.ProcessGroup | None = None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for length in LENGTHS if dtype == torch.float32 else LENGTHS[1:3]:
            given = _all_given(length, dtype)
            for op in (AVG, SUM):
                tensor = given[rank].clone()
                assert compressed.all_reduce(tensor, op=op, group=group) is None
                assert torch.equal(tensor, defined_result(given, op == AVG)), f"{dtype} {length} {op}"

            output = torch.empty(size * length, dtype=dtype)
            assert compressed.all_gather_into_tensor(output, given[rank], group=group) is None
            assert torch.equal(output, torch.cat([coded(each) for each in given])), f"{dtype} {length}"

            # The result of a reduction is not coded: gathered exactly and coded then, it is that of all_reduce.
            inputs = _all_given(size * length, dtype)
            part = torch.empty(length, dtype=dtype)
            assert compressed.reduce_scatter_tensor(part, inputs[rank], AVG, group) is None
            parts = [torch.empty_like(part) for _ in range(size)]
            dist.all_gather(parts, part)
            assert torch.equal(torch.cat([coded(each) for each in parts]), defined_result(inputs)), f"{length}"


def _check_another_codec() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given, part, whole = _given(rank, 1000 * size), torch.empty(1000), torch.empty(1000 * size)
    by_default, tensor = given.clone(), given.clone()
    compressed.all_reduce(by_default)
    work = compressed.all_reduce(tensor, codec="4bit", async_op=True)
    assert work is not None
    work.wait()
    assert not torch.equal(tensor, by_default)
    assert torch.cosine_similarity(tensor, torch.stack(_all_given(1000 * size)).sum(0), dim=0) > 0.9
    compressed.reduce_scatter_tensor(part, given, codec="4bit")
    compressed.all_gather_into_tensor(whole, part, codec="4bit")
    assert torch.equal(whole, tensor)


def _check_shapes_and_order() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # A scalar, a matrix, a leaf that wants a gradient, nothing.
    for shape in ((), (3, 5), (2, 0)):
        length = torch.Size(shape).numel()
        given = [_given(each, length).view(shape) for each in range(size)]
        tensor = given[rank].clone().requires_grad_()
        compressed.all_reduce(tensor)
        expected = defined_result([each.view(-1) for each in given], False) if length else given[rank].view(-1)
        assert torch.equal(tensor.detach().view(-1), expected)
    output = torch.empty(2 * size, 4)
    compressed.all_gather_into_tensor(output, _given(rank, 8).view(2, 4))
    assert torch.equal(output.view(-1), torch.cat([coded(each) for each in _all_given(8)]))
    # In one order with the group's other operations, none of which is waited for before the last.
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor, async_op=True)
    compressed.all_reduce(tensor, op=SUM, codec="minmax_uint8", async_op=True)  # which keeps a constant what it is
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(tensor, torch.full((1000,), float(sum(range(size)) * size**2)))


def _message(call: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def _check_refusals() -> None:
    size = dist.get_world_size()
    ones = torch.ones(4)
    transposed, all_ones, gather = torch.ones(4, 3).t(), torch.ones(4 * size), compressed.all_gather_into_tensor
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "AVG", lambda: compressed.all_reduce(ones, op=dist.ReduceOp.MAX)),
        (ValueError, "SUM", lambda: compressed.reduce_scatter_tensor(ones, ones, op=dist.ReduceOp.MIN)),
        (ValueError, "minmax_uint8", lambda: compressed.all_reduce(ones, codec="minmax")),
        (TypeError, "float32", lambda: compressed.all_reduce(ones.int())),
        (TypeError, "float32", lambda: gather(all_ones.cfloat(), ones.cfloat())),
        (ValueError, "contiguous()", lambda: compressed.all_reduce(transposed)),
        (ValueError, "contiguous()", lambda: gather(torch.ones(8 * size)[::2], ones)),
        (ValueError, "dense", lambda: compressed.all_reduce(ones.to_sparse())),
        (ValueError, f"{4 * size} elements", lambda: gather(torch.ones(3), ones)),
        (ValueError, f"{4 * size} elements", lambda: compressed.reduce_scatter_tensor(ones, torch.ones(3))),
        (TypeError, "dtype", lambda: gather(all_ones.double(), ones)),
        (TypeError, "write codec='4bit'", lambda: compressed.all_reduce(ones, AVG, "4bit")),  # type: ignore[arg-type]
        (TypeError, "tensor", lambda: compressed.all_reduce([ones])),  # type: ignore[arg-type]
    ]
    for error, words, call in refused:
        assert words in _message(call, error)
    # The group is as usable as before.
    compressed.all_reduce(ones, AVG, codec="minmax_uint8")
    assert torch.equal(ones, torch.ones(4))


def _check_groups() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0])
    tensor = _given(rank, 97)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work = compressed.all_reduce(tensor, group=group, async_op=True)
    if rank == 0:
        assert work is not None
        work.wait()
    else:
        assert work is None
        assert any("does not belong to the given group" in str(warning.message) for warning in caught)
    assert torch.equal(tensor, _given(rank, 97)), "a group of one rank codes nothing"


def _check_everything() -> None:
    _check_values()
    _check_another_codec()
    _check_shapes_and_order()
    _check_refusals()
    _check_groups()


@pytest.mark.parametrize("size", [2, 3])
def test_values_arguments_and_groups(rank_pools: Pools, size: int) -> None:
    rank_pools[size].run(_check_everything, timeout=120)


@pytest.mark.cpu_only("gloo")
@on_new_ranks(2, backend="gloo")
def test_a_stock_gloo_group() -> None:
    _check_values()
    first = _given(dist.get_rank(), 1003)
    for _ in range(3):
        compressed.all_reduce(first)


@pytest.mark.cpu_only("NCCL compares nothing")
@on_new_ranks(2)
def test_ranks_that_do_not_call_the_same_are_told() -> None:
    for odd in ({"op": SUM}, {"length": 65}, {"codec": "4bit"}):
        call: dict[str, Any] = {"codec": "int8", "op": AVG, "length": 64, **(odd if dist.get_rank() == 1 else {})}
        # A group of its own, which ends with the error.
        mismatched = partial(compressed.all_reduce, torch.ones(call.pop("length")), group=dist.new_group(), **call)
        with named(odd):
            message = _message(mismatched, dist.DistBackendError)
            assert "bagua:compressed_all_reduce" in message
            assert "rank 0" in message
            assert "rank 1" in message
            # It comes before sizes that do not fit, and tells what they follow from.
            assert ("4bit" in message) == ("codec" in odd)


@pytest.mark.parametrize("name", compressed.__all__)
def test_names_order_and_defaults_are_those_of_torch(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (compressed, dist))
    *common, codec = ours.parameters.values()
    assert [(p.name, p.default) for p in common] == [(p.name, p.default) for p in theirs.parameters.values()]
    assert (codec.name, codec.kind, codec.default) == ("codec", inspect.Parameter.KEYWORD_ONLY, "int8")


@on_ranks(2)
def test_former_names_warn_and_work() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = _given(rank, 128 * size)
    part, expected = torch.empty(128), torch.empty(128)
    with pytest.warns(FutureWarning, match="reduce_scatter_tensor"):
        compressed.reduce_scatter(part, given, AVG, "4bit")
    compressed.reduce_scatter_tensor(expected, given, AVG, codec="4bit")
    assert torch.equal(part, expected)
    assert inspect.signature(compressed.reduce_scatter).parameters["op"].default == AVG
    whole, expected = torch.empty(128 * size), torch.empty(128 * size)
    with pytest.warns(FutureWarning, match="all_gather_into_tensor"):
        compressed.all_gather(whole, part, "4bit")
    compressed.all_gather_into_tensor(expected, part, codec="4bit")
    assert torch.equal(whole, expected)
