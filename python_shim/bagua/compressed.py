# SPDX-License-Identifier: Apache-2.0
"""Collectives whose messages are coded into fewer bytes, with the names, order and defaults of torch.distributed::

    bagua.compressed.all_reduce(tensor, op=ReduceOp.SUM)         # the sum over the ranks, 8 bits per element
    work = bagua.compressed.all_gather_into_tensor(output, input, async_op=True, codec="4bit")

Every rank of the group calls, with the same operation, codec, dtype and size; otherwise the ranks get an error that
names both calls. All ranks take part in rank order, wherever they run: each codes what it sends, to ranks of its own
host too. A group of one rank codes nothing, its results are exact.

The group may be of backend "bagua" or of a stock one ("gloo", "nccl"). On "bagua" these operations are in one order
with the group's others. On "gloo" they run on a "bagua" group of their own, which the first call makes, and every
rank makes that call at the same place of its program. Streams and `Work` are as in torch.distributed: on CUDA the
operation starts after what the current stream has been given, and `wait()` lets the current stream wait for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua._executors import shared_executors_for
from bagua._native import _C
from bagua._torch_private import default_group, is_outside

__all__ = ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]


# What op= is where the caller says nothing.
_UNSAID = dist.ReduceOp(dist.ReduceOp.SUM)


def _averages(op: dist.ReduceOp | dist.ReduceOp.RedOpType, name: str) -> bool:
    if op == dist.ReduceOp.AVG:
        return True
    if op == dist.ReduceOp.SUM:
        return False
    raise ValueError(f"bagua.compressed.{name}: op must be ReduceOp.AVG or ReduceOp.SUM, got {op}")


def _check_tensors(name: str, tensors: dict[str, Tensor]) -> None:
    for role, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"bagua.compressed.{name}: {role} must be a tensor, got {type(tensor).__qualname__}")
        if tensor.layout == torch.strided and not tensor.is_contiguous():
            raise ValueError(
                f"bagua.compressed.{name}: {role} must be contiguous, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: pass {role}.contiguous(), and copy back what is written to it"
            )


def _run(
    name: str,
    start: Callable[[Any, bool], dist.Work],
    tensors: dict[str, Tensor],
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
    async_op: bool,
) -> dist.Work | None:
    """Check what the caller gave, and call `start(executors, whether to average)`.

    Where this rank is not in the group, there is a warning like torch's instead.
    """
    if isinstance(group, str):
        raise TypeError(f"bagua.compressed.{name}: group must be a process group, got {group!r}: write codec={group!r}")
    if is_outside(group, f"bagua.compressed.{name}"):
        return None
    average = _averages(op, name)
    _check_tensors(name, tensors)
    device = next(iter(tensors.values())).device
    work = start(shared_executors_for(group or default_group(), device), average)
    if async_op:
        return work
    work.wait()
    return None


def all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = _UNSAID,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str = _C.DEFAULT_CODEC,
) -> dist.Work | None:
    """Replace `tensor` by its sum or mean over the ranks, with coded messages.

    All ranks end with the same bits. Each element is coded twice, once on the way to the rank that adds up its part
    and once on the way back; the sums in between are of float32 (of float64 for float64). Sends about
    `2 (n-1)/n` coded tensors per rank, for n ranks.

    Args:
        tensor: any shape, contiguous; float32, float64, float16 or bfloat16, on the CPU or on CUDA. Changed in place.
            The flat tensor is cut into n parts of `ceil(numel / n)` elements, the last ones shorter or empty; a codec
            with a range or scale for the whole of what it codes has one for each part.
        op: `ReduceOp.SUM` (default) or `ReduceOp.AVG`. The mean was the default before; until the next release a call
            without it warns.
        group: None is the default group.
        async_op: return at once, with a `Work` to wait for.
        codec: one of `bagua.available_codecs()`.

    Returns:
        The `Work` if `async_op`; None otherwise, and on ranks that are not in the group.

    Raises:
        ValueError: another op, an unknown codec (the message lists the known ones), a tensor that is not contiguous.
        TypeError: another dtype.
        torch.distributed.DistBackendError: ranks that do not call the same, a rank that failed or did not come in time.
    """
    if op is _UNSAID:
        warnings.warn(
            "bagua.compressed.all_reduce without op= gives the sum, as in torch.distributed; it gave the mean before: "
            "say op=ReduceOp.SUM or op=ReduceOp.AVG",
            FutureWarning,
            stacklevel=2,
        )
    return _run(
        "all_reduce",
        lambda executors, average: _C.compressed_all_reduce(executors, tensor, codec, average, not async_op),
        {"tensor": tensor},
        op,
        group,
        async_op,
    )


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str = _C.DEFAULT_CODEC,
) -> dist.Work | None:
    """Fill `output` with the sum or mean over the ranks of this rank's part of `input`, with coded messages.

    Each element is coded once, on the way to the rank that adds it up; the result is not. Sends about `(n-1)/n` coded
    inputs per rank, for n ranks.

    Args:
        output: any shape, contiguous; dtype and device as in `all_reduce`.
        input: n times as many elements as `output`, contiguous; rank r receives elements
            `[r * output.numel(), (r + 1) * output.numel())` of the flat tensor.
        op: `ReduceOp.SUM` (default) or `ReduceOp.AVG`.
        codec: each rank's part is coded as a unit.

    The other arguments, what is returned and what is raised: as of `all_reduce`, and ValueError for sizes that do not
    fit.
    """
    return _run(
        "reduce_scatter_tensor",
        lambda executors, average: _C.compressed_reduce_scatter(executors, output, input, codec, average, not async_op),
        {"output": output, "input": input},
        op,
        group,
        async_op,
    )


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str = _C.DEFAULT_CODEC,
) -> dist.Work | None:
    """Fill `output_tensor` with the `input_tensor` of every rank, in rank order, as the coded messages give it.

    All ranks end with the same bits: this rank's own part of it is coded and decoded too. Sends `n - 1` coded
    inputs per rank, for n ranks.

    Args:
        output_tensor: n times as many elements as `input_tensor`, contiguous; dtype and device as in `all_reduce`.
        input_tensor: any shape, contiguous. Coded as a unit.

    The other arguments, what is returned and what is raised: as of `all_reduce`, and ValueError for sizes that do not
    fit.
    """
    return _run(
        "all_gather_into_tensor",
        lambda executors, _: _C.compressed_all_gather(executors, output_tensor, input_tensor, codec, not async_op),
        {"input_tensor": input_tensor, "output_tensor": output_tensor},
        dist.ReduceOp.SUM,
        group,
        async_op,
    )


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
    codec: str = _C.DEFAULT_CODEC,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Do what `reduce_scatter_tensor` does, in the former order and with the mean by default. It goes after 0.2."""
    _warn("reduce_scatter", "reduce_scatter_tensor(output, input, op=ReduceOp.AVG, codec=...)")
    return reduce_scatter_tensor(output, input, op, group, async_op, codec=codec)


def all_gather(
    output: Tensor,
    input: Tensor,
    codec: str = _C.DEFAULT_CODEC,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Do what `all_gather_into_tensor` does, in the former order. It goes after 0.2."""
    _warn("all_gather", "all_gather_into_tensor(output, input, codec=...)")
    return all_gather_into_tensor(output, input, group, async_op, codec=codec)


def _warn(old: str, new: str) -> None:
    text = f"bagua.compressed.{old} goes after version 0.2: write bagua.compressed.{new}"
    warnings.warn(text, FutureWarning, stacklevel=3)
