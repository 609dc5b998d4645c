# SPDX-License-Identifier: Apache-2.0
"""Messages from one rank: broadcast, send and recv, objects; and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.torch_api._checks import Checks
from bagua.torch_api._coalescing import flattened
from bagua.torch_api._communicators import Comm
from bagua.torch_api._groups import resolve


def broadcast(tensor: Tensor, root: int = 0, comm: Comm = None, *, src: int | None = None) -> None:
    """Give all ranks the `tensor` of rank `root`.

    Args:
        tensor: what is sent on rank `root`, overwritten elsewhere; the same number of elements and dtype everywhere.
        root: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.
        src: another name of `root`, as from version 0.7 of the original.

    Raises:
        ValueError: `root` is no rank of the communicator, or differs from `src`.
        RuntimeError: before `init_process_group`.

    Definition: `bagua.torch_api.communication` of Bagua 0.6.
    """
    found = resolve(comm, "broadcast")
    if found is None:
        return
    checks = Checks("broadcast", found)
    tensor = checks.tensor("tensor", tensor)
    if src is not None:
        if root not in (0, src):
            raise ValueError(f"{checks.where}: root and src mean the same rank, got root={root} and src={src}")
        root = src
    root = checks.peer("root", root)
    with found.blocking(tensor):
        dist.broadcast(tensor, group=found.torch_group, group_src=root)


def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, comm: Comm = None) -> None:
    """As `broadcast` for each of `tensors`, with one message per dtype and device.

    Args:
        tensors: the same shapes and dtypes, in the same order, on every rank.
        src: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `broadcast`.
    """
    found = resolve(comm, "broadcast_coalesced")
    if found is None:
        return
    checks = Checks("broadcast_coalesced", found)
    src = checks.peer("src", src)
    for group in flattened(checks.tensors("tensors", tensors)):
        with found.blocking(group.tensors[0]):
            flat = group.join()
            dist.broadcast(flat, group=found.torch_group, group_src=src)
            group.take_from(flat)


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Return the `obj` of rank `src` on all ranks.

    It travels pickled: use it among processes that trust each other.

    Args:
        obj: anything that pickle takes, on rank `src`; unused elsewhere.
        src: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Returns:
        The object, on rank `src` the same one; None on ranks outside the communicator.

    Raises:
        ValueError, RuntimeError: as `broadcast`.
    """
    found = resolve(comm, "broadcast_object")
    if found is None:
        return None
    src = Checks("broadcast_object", found).peer("src", src)
    objects = [obj if found.rank() == src else None]
    dist.broadcast_object_list(objects, group=found.torch_group, group_src=src)
    return objects[0]


def send(tensor: Tensor, dst: int, comm: Comm = None) -> None:
    """Send `tensor` to rank `dst`, which has to call `recv`.

    Args:
        tensor: contiguous.
        dst: another rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: `dst` is this rank or no rank of the communicator, or a tensor that is not contiguous.
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "send")
    if found is None:
        return
    checks = Checks("send", found)
    flat, dst = checks.flat("tensor", tensor), checks.other("dst", dst)
    with found.blocking(flat):
        dist.send(flat, group=found.torch_group, group_dst=dst)


def recv(tensor: Tensor, src: int, comm: Comm = None) -> None:
    """Overwrite `tensor` by what rank `src` sends with `send`.

    Args:
        tensor: contiguous, with as many elements of the same dtype as are sent.
        src: another rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: `src` is this rank or no rank of the communicator, or a tensor that is not contiguous.
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "recv")
    if found is None:
        return
    checks = Checks("recv", found)
    flat, src = checks.flat("tensor", tensor), checks.other("src", src)
    with found.blocking(flat):
        dist.recv(flat, group=found.torch_group, group_src=src)


def barrier(comm: Comm = None) -> None:
    """Return when all ranks have called and, on each, what its current CUDA stream held before is done.

    Args:
        comm: a communicator; by default all ranks of the default group.

    Raises:
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "barrier")
    if found is None:
        return
    # The smallest reduction, as in the original. Where the group takes CPU tensors, NCCL need not be woken for it.
    devices = found.torch_group._device_types
    is_on_cuda = bool(devices) and torch.device("cpu") not in devices
    tensor = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()) if is_on_cuda else "cpu")
    if not is_on_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
    with found.blocking(tensor):
        dist.all_reduce(tensor, group=found.torch_group)
