# SPDX-License-Identifier: Apache-2.0
"""Collectives that gradients pass through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.torch_api.communication import BaguaProcessGroup, from_torch_group


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, group: dist.ProcessGroup | None, tensor: Tensor) -> Tensor:  # type: ignore[override]
        ctx.op, ctx.group = op, group
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=op, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        return None, None, _AllReduce.apply(ctx.op, ctx.group, gradient)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce a tensor over the ranks, differentiably; the gradient is reduced by the same operation.

    Args:
        tensor: of the same shape on all ranks; stays as it is.
        op: torch's ReduceOp.SUM or MAX.
        group: the ranks; by default all.

    Returns:
        the reduction, on every rank.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> all_reduce(x * 3).sum().backward()
    >>> x.grad / dist.get_world_size()
    tensor([3., 3.])
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        raise ValueError(f"all_reduce with gradients knows ReduceOp.SUM and MAX, got {op}")
    result: Tensor = _AllReduce.apply(op, group, tensor)
    return result


def to_bagua_process_group(process_group: dist.ProcessGroup | BaguaProcessGroup | None = None) -> BaguaProcessGroup:
    """Return the Bagua group of the same ranks; of all ranks for None."""
    if isinstance(process_group, BaguaProcessGroup):
        return process_group
    return from_torch_group(process_group if process_group is not None else dist.group.WORLD)
