# SPDX-License-Identifier: Apache-2.0
"""Collectives that reduce: allreduce, reduce.

`op` is a `bagua.torch_api.ReduceOp` or one of torch.distributed. `comm` and errors: see
`bagua.torch_api.communication`.
"""

from __future__ import annotations

import inspect
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor

from bagua.torch_api._checks import Checks
from bagua.torch_api._collective import collective
from bagua.torch_api._communicators import Comm


@collective("allreduce")
def allreduce_inplace(checks: Checks, tensor: Tensor, op: Any = dist.ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks; afterwards it is bitwise identical on all of them."""
    tensor, torch_op = checks.tensor("tensor", tensor), checks.reduction(op)
    dist.all_reduce(tensor, torch_op, group=checks.group)


@collective("allreduce")
def _allreduce_out_of_place(
    checks: Checks, send_tensor: Tensor, recv_tensor: Tensor, op: Any = dist.ReduceOp.SUM, comm: Comm = None
) -> None:
    send, recv = checks.tensor("send_tensor", send_tensor), checks.tensor("recv_tensor", recv_tensor)
    checks.as_many("recv_tensor", recv, "send_tensor", send)
    torch_op = checks.reduction(op)
    recv.copy_(send.reshape(recv.shape))
    dist.all_reduce(recv, torch_op, group=checks.group)


@overload
def allreduce(tensor: Tensor, op: Any = ..., comm: Comm = ...) -> None: ...
@overload
def allreduce(send_tensor: Tensor, recv_tensor: Tensor, op: Any = ..., comm: Comm = ...) -> None: ...
def allreduce(*args: Any, **kwargs: Any) -> None:
    """Reduce a tensor over all ranks, which all get the result, bitwise identical.

    `allreduce(tensor, op, comm)` works in place, as documented up to version 0.6 of the original;
    `allreduce(send_tensor, recv_tensor, op, comm)`, as from 0.7, writes to `recv_tensor`. A tensor as the second
    argument makes the difference.

    Args:
        tensor: input and output, of the same shape and dtype on every rank; any dtype of torch.distributed.
        op: a `torch.distributed.ReduceOp` or a `bagua.torch_api.ReduceOp`.
        comm: a communicator; by default all ranks of the default group.

    With two ranks, [1, 2] on rank 0 and [3, 4] on rank 1:

    >>> tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
    >>> allreduce(tensor)
    >>> tensor
    tensor([4, 6])
    """
    if _is_out_of_place(args, kwargs):
        _allreduce_out_of_place(*args, **kwargs)
    else:
        allreduce_inplace(*args, **kwargs)


@collective("reduce")
def reduce_inplace(checks: Checks, tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks; rank `dst` gets the result, the content of the others is undefined afterwards."""
    tensor, dst, torch_op = checks.tensor("tensor", tensor), checks.peer("dst", dst), checks.reduction(op)
    dist.reduce(tensor, op=torch_op, group=checks.group, group_dst=dst)


@collective("reduce")
def _reduce_out_of_place(
    checks: Checks, send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, comm: Comm = None
) -> None:
    send, recv, dst = checks.tensor("send_tensor", send_tensor), recv_tensor, checks.peer("dst", dst)
    if checks.rank == dst or isinstance(recv, Tensor):
        checks.as_many("recv_tensor", checks.tensor("recv_tensor", recv), "send_tensor", send)
    torch_op = checks.reduction(op)
    # Whatever the backend leaves on the other ranks, it must not be in their input.
    result = send.clone()
    dist.reduce(result, op=torch_op, group=checks.group, group_dst=dst)
    if checks.rank == dst:
        recv.copy_(result.reshape(recv.shape))


@overload
def reduce(tensor: Tensor, dst: int, op: Any = ..., comm: Comm = ...) -> None: ...
@overload
def reduce(send_tensor: Tensor, recv_tensor: Tensor | None, dst: int, op: Any = ..., comm: Comm = ...) -> None: ...
def reduce(*args: Any, **kwargs: Any) -> None:
    """Reduce a tensor over all ranks; only rank `dst` gets the result.

    `reduce(tensor, dst, op, comm)` works in place, as documented up to version 0.6 of the original;
    `reduce(send_tensor, recv_tensor, dst, op, comm)`, as from 0.7, writes to `recv_tensor` of rank `dst` and leaves
    `send_tensor` alone; the other ranks may give None for `recv_tensor`.

    Args:
        tensor: input and output; its content is undefined afterwards on ranks other than `dst`.
        dst: a rank of the communicator.
        op: a `torch.distributed.ReduceOp` or a `bagua.torch_api.ReduceOp`.
        comm: a communicator; by default all ranks of the default group.
    """
    if _is_out_of_place(args, kwargs):
        _reduce_out_of_place(*args, **kwargs)
    else:
        reduce_inplace(*args, **kwargs)


def _is_out_of_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "send_tensor" in kwargs or "recv_tensor" in kwargs:
        return True
    return len(args) > 1 and (args[1] is None or isinstance(args[1], Tensor))


# The documented ones, in the place of *args and **kwargs.
allreduce.__signature__ = inspect.signature(allreduce_inplace)  # type: ignore[attr-defined]
reduce.__signature__ = inspect.signature(reduce_inplace)  # type: ignore[attr-defined]
