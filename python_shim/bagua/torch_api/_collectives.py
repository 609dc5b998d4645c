# SPDX-License-Identifier: Apache-2.0
"""allreduce, reduce, broadcast and the barrier. What they have in common: see `bagua.torch_api.communication`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from bagua._torch_private import device_types
from bagua.torch_api._groups import Comm, Communicator, resolve


class ReduceOp(IntEnum):
    """Element-wise reductions, with the original's values (which are those of its communication library).

    >>> int(ReduceOp.AVG)
    10
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


class _Call:
    """One call of an operation on a communicator.

    Errors name operation, rank, what was expected and what came, before anything is communicated.
    """

    def __init__(self, operation: str, comm: Communicator) -> None:
        self.where = f"{operation} on rank {comm.rank()} of {comm.nranks()}"
        self.group = comm.torch_group
        self.rank = comm.rank()
        self._nranks = comm.nranks()
        # Of the tensors that were checked.
        self._devices: set[torch.device] = set()

    def tensor(self, name: str, given: Any) -> Tensor:
        """Return `given` if it is a dense tensor."""
        if not isinstance(given, Tensor):
            raise TypeError(f"{self.where}: {name} must be a tensor, got {type(given).__qualname__}")
        if given.layout != torch.strided:
            raise ValueError(f"{self.where}: {name} must be a dense tensor, got layout {given.layout}")
        self._devices.add(given.device)
        return given

    def check_result(self, recv: Tensor, send: Tensor) -> None:
        """Refuse a result of another dtype, device or number of elements than what is sent."""
        if recv.dtype != send.dtype or recv.device != send.device:
            raise ValueError(
                f"{self.where}: recv_tensor must be {send.dtype} on {send.device} as send_tensor, got {recv.dtype} "
                f"on {recv.device}"
            )
        if recv.numel() != send.numel():
            raise ValueError(
                f"{self.where}: recv_tensor must have {send.numel()} elements (as many as send_tensor), got "
                f"{recv.numel()} of shape {tuple(recv.shape)}"
            )

    def reduction(self, op: Any) -> Any:
        """Return torch's reduce operation for `op`: a `ReduceOp`, its number, or already one of torch's."""
        if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return op
        # A bool is an int, and True would be PRODUCT: `allreduce(tensor, True)` meant "average" in version 0.5.
        if isinstance(op, int) and not isinstance(op, bool) and op in list(ReduceOp):
            return getattr(dist.ReduceOp, ReduceOp(op).name)
        names = ", ".join(f"{one.name} ({one.value})" for one in ReduceOp)
        raise ValueError(
            f"{self.where}: op must be a bagua.torch_api.ReduceOp ({names}) or a torch.distributed.ReduceOp, got {op!r}"
        )

    def peer(self, name: str, given: Any) -> int:
        """Return `given` if it is a rank of the communicator."""
        if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < self._nranks:
            raise ValueError(
                f"{self.where}: {name} must be a rank of the communicator, 0 to {self._nranks - 1}, got {given!r}"
            )
        return given

    def wait(self) -> None:
        """Have the communication of the tensors be over for the host too, as in the original.

        On the CPU torch's operations block by themselves; on CUDA the host waits for the current stream.
        """
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


@contextmanager
def _calling(operation: str, comm: Comm) -> Iterator[_Call | None]:
    """Give the block its `_Call`; None where the communicator is that of others."""
    communicator = resolve(comm, operation)
    if communicator is None:
        yield None
        return
    call = _Call(operation, communicator)
    with torch.no_grad():
        yield call
    call.wait()


def allreduce_inplace(tensor: Tensor, op: Any = dist.ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks; afterwards it is bitwise identical on all of them."""
    with _calling("allreduce", comm) as call:
        if call:
            dist.all_reduce(call.tensor("tensor", tensor), call.reduction(op), group=call.group)


def _allreduce_out_of_place(
    send_tensor: Tensor, recv_tensor: Tensor, op: Any = dist.ReduceOp.SUM, comm: Comm = None
) -> None:
    with _calling("allreduce", comm) as call:
        if call:
            send, recv = call.tensor("send_tensor", send_tensor), call.tensor("recv_tensor", recv_tensor)
            call.check_result(recv, send)
            torch_op = call.reduction(op)
            recv.copy_(send.reshape(recv.shape))
            dist.all_reduce(recv, torch_op, group=call.group)


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


def reduce_inplace(tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks; rank `dst` gets the result, the content of the others is undefined afterwards."""
    with _calling("reduce", comm) as call:
        if call:
            tensor, dst, torch_op = call.tensor("tensor", tensor), call.peer("dst", dst), call.reduction(op)
            dist.reduce(tensor, op=torch_op, group=call.group, group_dst=dst)


def _reduce_out_of_place(
    send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, comm: Comm = None
) -> None:
    with _calling("reduce", comm) as call:
        if call:
            send, dst = call.tensor("send_tensor", send_tensor), call.peer("dst", dst)
            if call.rank == dst or isinstance(recv_tensor, Tensor):
                call.check_result(call.tensor("recv_tensor", recv_tensor), send)
            torch_op = call.reduction(op)
            # Whatever the backend leaves on the other ranks, it must not be in their input.
            result = send.clone()
            dist.reduce(result, op=torch_op, group=call.group, group_dst=dst)
            if call.rank == dst:
                recv_tensor.copy_(result.reshape(recv_tensor.shape))


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


def broadcast(tensor: Tensor, root: int = 0, comm: Comm = None, *, src: int | None = None) -> None:
    """Give all ranks the `tensor` of rank `root`.

    Args:
        tensor: what is sent on rank `root`, overwritten elsewhere; the same number of elements and dtype everywhere.
        root: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.
        src: another name of `root`, as from version 0.7 of the original.
    """
    with _calling("broadcast", comm) as call:
        if call:
            tensor = call.tensor("tensor", tensor)
            if src is not None and root not in (0, src):
                raise ValueError(f"{call.where}: root and src mean the same rank, got root={root} and src={src}")
            root = call.peer("root", root if src is None else src)
            dist.broadcast(tensor, group=call.group, group_src=root)


def barrier(comm: Comm = None) -> None:
    """Return when all ranks have called and, on each, what its current CUDA stream held before is done."""
    with _calling("barrier", comm) as call:
        if call:
            # The smallest reduction, as in the original. A group that takes CPU tensors need not wake NCCL for it.
            devices = device_types(call.group)
            is_on_cuda = bool(devices) and torch.device("cpu") not in devices
            device = torch.device("cuda", torch.cuda.current_device()) if is_on_cuda else "cpu"
            tensor = call.tensor("tensor", torch.zeros(1, device=device))
            if not is_on_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.current_stream().synchronize()
            dist.all_reduce(tensor, group=call.group)
