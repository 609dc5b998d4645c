# SPDX-License-Identifier: Apache-2.0
"""Collectives that reduce: allreduce, reduce, reduce_scatter."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor

from bagua.torch_api._checks import Checks
from bagua.torch_api._coalescing import flattened
from bagua.torch_api._communicators import Comm
from bagua.torch_api._groups import resolve
from bagua.torch_api.reduce_op import ReduceOp


def allreduce_inplace(tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks; afterwards it is bitwise identical on all of them.

    Args:
        tensor: input and output, of the same shape and dtype on every rank; any dtype of torch.distributed.
        op: a `bagua.torch_api.ReduceOp` or a `torch.distributed.ReduceOp`.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: an `op` that is none.
        RuntimeError: before `init_process_group`; an `op` that the dtype or the backend does not have.

    Definition: `bagua.torch_api.communication` of Bagua 0.7 and later.
    """
    found = resolve(comm, "allreduce")
    if found is None:
        return
    checks = Checks("allreduce", found)
    tensor, torch_op = checks.tensor("tensor", tensor), checks.reduction(op)
    with found.blocking(tensor):
        dist.all_reduce(tensor, torch_op, group=found.torch_group)


def _allreduce_out_of_place(
    send_tensor: Tensor, recv_tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None
) -> None:
    found = resolve(comm, "allreduce")
    if found is None:
        return
    checks = Checks("allreduce", found)
    send, recv = checks.tensor("send_tensor", send_tensor), checks.tensor("recv_tensor", recv_tensor)
    _check_pair(checks, send, recv)
    torch_op = checks.reduction(op)
    with found.blocking(recv):
        recv.copy_(send.reshape(recv.shape))
        dist.all_reduce(recv, torch_op, group=found.torch_group)


def _check_pair(checks: Checks, send: Tensor, recv: Tensor) -> None:
    checks.alike("recv_tensor", recv, "send_tensor", send)
    checks.elements("recv_tensor", recv, send.numel(), "as many as send_tensor")


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
        tensor: input and output.
        op: a `torch.distributed.ReduceOp` or a `bagua.torch_api.ReduceOp`.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `allreduce_inplace`; `recv_tensor` differs from `send_tensor` in dtype, device or
            number of elements.

    With two ranks, [1, 2] on rank 0 and [3, 4] on rank 1:

    >>> tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
    >>> allreduce(tensor)
    >>> tensor
    tensor([4, 6])

    Definition: `bagua.torch_api.communication` of Bagua 0.6.
    """
    if _is_out_of_place(args, kwargs):
        _allreduce_out_of_place(*args, **kwargs)
    else:
        allreduce_inplace(*args, **kwargs)


def reduce_inplace(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks; rank `dst` gets the result, the content of the others is undefined afterwards.

    Args:
        tensor: input and output, of the same shape and dtype on every rank.
        dst: a rank of the communicator.
        op: as for `allreduce_inplace`.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: `dst` is no rank of the communicator, or as `allreduce_inplace`.
        RuntimeError: as `allreduce_inplace`.

    Definition: `bagua.torch_api.communication` of Bagua 0.7 and later.
    """
    found = resolve(comm, "reduce")
    if found is None:
        return
    checks = Checks("reduce", found)
    tensor, dst, torch_op = checks.tensor("tensor", tensor), checks.peer("dst", dst), checks.reduction(op)
    with found.blocking(tensor):
        dist.reduce(tensor, op=torch_op, group=found.torch_group, group_dst=dst)


def _reduce_out_of_place(
    send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, comm: Comm = None
) -> None:
    found = resolve(comm, "reduce")
    if found is None:
        return
    checks = Checks("reduce", found)
    send, recv, dst = checks.tensor("send_tensor", send_tensor), recv_tensor, checks.peer("dst", dst)
    if found.rank() == dst or isinstance(recv, Tensor):
        _check_pair(checks, send, checks.tensor("recv_tensor", recv))
    torch_op = checks.reduction(op)
    with found.blocking(send):
        # Whatever the backend leaves on the other ranks, it is not to be in their input.
        result = send.clone()
        dist.reduce(result, op=torch_op, group=found.torch_group, group_dst=dst)
        if found.rank() == dst:
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

    Raises:
        ValueError, RuntimeError: as `reduce_inplace` and `allreduce`.

    Definition: `bagua.torch_api.communication` of Bagua 0.6.
    """
    if _is_out_of_place(args, kwargs):
        _reduce_out_of_place(*args, **kwargs)
    else:
        reduce_inplace(*args, **kwargs)


def _is_out_of_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "send_tensor" in kwargs or "recv_tensor" in kwargs:
        return True
    return len(args) > 1 and (args[1] is None or isinstance(args[1], Tensor))


def _document_signature(function: Any, in_place: Any) -> None:
    """Show the documented signature, with the documented default of `op`, instead of *args and **kwargs."""
    signature = inspect.signature(in_place)
    parameters = [
        one.replace(default=dist.ReduceOp.SUM) if one.name == "op" else one for one in signature.parameters.values()
    ]
    function.__signature__ = signature.replace(parameters=parameters)


_document_signature(allreduce, allreduce_inplace)
_document_signature(reduce, reduce_inplace)


def reduce_scatter(send_tensor: Tensor, recv_tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `send_tensor` over all ranks; rank r gets the r-th part of the result.

    Args:
        send_tensor: nranks x n elements.
        recv_tensor: n elements of the same dtype.
        op: as for `allreduce_inplace`.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: other numbers of elements, dtypes or devices, or a tensor that is not contiguous.
        RuntimeError: as `allreduce_inplace`.
    """
    found = resolve(comm, "reduce_scatter")
    if found is None:
        return
    checks = Checks("reduce_scatter", found)
    send, recv = checks.flat("send_tensor", send_tensor), checks.flat("recv_tensor", recv_tensor)
    checks.alike("recv_tensor", recv, "send_tensor", send)
    checks.elements("send_tensor", send, found.nranks() * recv.numel(), f"{found.nranks()} x those of recv_tensor")
    torch_op = checks.reduction(op)
    with found.blocking(send):
        dist.reduce_scatter_tensor(recv, send, torch_op, group=found.torch_group)


def reduce_scatter_inplace(tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks; rank r finds the r-th part of the result in the FIRST part of `tensor`.

    The other parts are left as they were.

    Args:
        tensor: nranks x n elements.
        op: as for `allreduce_inplace`.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: a number of elements that is no multiple of the number of ranks, or a tensor that is not contiguous.
        RuntimeError: as `allreduce_inplace`.
    """
    found = resolve(comm, "reduce_scatter")
    if found is None:
        return
    checks = Checks("reduce_scatter", found)
    flat = checks.flat("tensor", tensor)
    count, torch_op = checks.chunk("tensor", flat), checks.reduction(op)
    with found.blocking(flat):
        result = flat.new_empty(count)
        dist.reduce_scatter_tensor(result, flat, torch_op, group=found.torch_group)
        flat[:count].copy_(result)


def allreduce_coalesced_inplace(tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """As `allreduce_inplace` for each of `tensors`, with one message per dtype and device.

    Args:
        tensors: the same shapes and dtypes, in the same order, on every rank.
        op: as for `allreduce_inplace`.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `allreduce_inplace`.
    """
    found = resolve(comm, "allreduce_coalesced")
    if found is None:
        return
    checks = Checks("allreduce_coalesced", found)
    torch_op = checks.reduction(op)
    for group in flattened(checks.tensors("tensors", tensors)):
        with found.blocking(group.tensors[0]):
            flat = group.join()
            dist.all_reduce(flat, torch_op, group=found.torch_group)
            group.take_from(flat)
