# SPDX-License-Identifier: Apache-2.0
"""Collectives that move elements without changing them: allgather, gather, scatter, alltoall.

Tensors are taken as flat, in row-major order; only their numbers of elements matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.torch_api._checks import Checks
from bagua.torch_api._communicators import Comm, Communicator
from bagua.torch_api._groups import resolve


def allgather(send_tensor: Tensor, recv_tensor: Tensor, comm: Comm = None) -> None:
    """Every rank gets the `send_tensor` of all ranks, one after the other.

    Args:
        send_tensor: n elements.
        recv_tensor: nranks x n elements of the same dtype.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: other numbers of elements, dtypes or devices, or a tensor that is not contiguous.
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "allgather")
    if found is None:
        return
    checks = Checks("allgather", found)
    send, recv = checks.flat("send_tensor", send_tensor), checks.flat("recv_tensor", recv_tensor)
    checks.alike("recv_tensor", recv, "send_tensor", send)
    checks.elements("recv_tensor", recv, found.nranks() * send.numel(), f"{found.nranks()} x those of send_tensor")
    with found.blocking(send):
        dist.all_gather_into_tensor(recv, send, group=found.torch_group)


def allgather_inplace(tensor: Tensor, comm: Comm = None) -> None:
    """As `allgather`, with what rank r sends in the r-th part of its `tensor`.

    Args:
        tensor: nranks x n elements.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: a number of elements that is no multiple of the number of ranks, or a tensor that is not contiguous.
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "allgather")
    if found is None:
        return
    checks = Checks("allgather", found)
    flat = checks.flat("tensor", tensor)
    count = checks.chunk("tensor", flat)
    with found.blocking(flat):
        dist.all_gather_into_tensor(flat, _part(flat, found.rank(), count).clone(), group=found.torch_group)


def gather(send_tensor: Tensor, recv_tensor: Tensor | None, dst: int, comm: Comm = None) -> None:
    """Rank `dst` gets the `send_tensor` of all ranks, one after the other.

    Args:
        send_tensor: n elements.
        recv_tensor: nranks x n elements of the same dtype; unused on other ranks than `dst`, which may give None.
        dst: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: other numbers of elements, dtypes or devices, a tensor that is not contiguous, or a `dst` that is
            no rank of the communicator.
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "gather")
    if found is None:
        return
    checks = Checks("gather", found)
    send, dst = checks.flat("send_tensor", send_tensor), checks.peer("dst", dst)
    recv = None
    # A wrong size is most likely wrong on every rank: better that all see it than that they wait for the root.
    if found.rank() == dst or recv_tensor is not None:
        recv = checks.flat("recv_tensor", recv_tensor)
        checks.alike("recv_tensor", recv, "send_tensor", send)
        checks.elements("recv_tensor", recv, found.nranks() * send.numel(), f"{found.nranks()} x those of send_tensor")
    with found.blocking(send):
        outputs = None if recv is None or found.rank() != dst else _parts(recv, found)
        dist.gather(send, outputs, group=found.torch_group, group_dst=dst)


def gather_inplace(tensor: Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """As `gather`; on rank `dst` its own elements are in their place in `tensor` already.

    Args:
        tensor: on rank `dst` nranks x `count` elements, of which it sends the `dst`-th part; elsewhere `count`.
        count: number of elements from each rank.
        dst: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `gather`.
    """
    found = resolve(comm, "gather")
    if found is None:
        return
    checks = Checks("gather", found)
    count, dst = checks.count("count", count), checks.peer("dst", dst)
    flat = _rooted(checks, found, tensor, count, dst)
    with found.blocking(flat):
        if found.rank() == dst:
            own = _part(flat, dst, count).clone()
            dist.gather(own, _parts(flat, found), group=found.torch_group, group_dst=dst)
        else:
            dist.gather(flat, None, group=found.torch_group, group_dst=dst)


def scatter(send_tensor: Tensor | None, recv_tensor: Tensor, src: int, comm: Comm = None) -> None:
    """Rank r gets the r-th part of the `send_tensor` of rank `src`.

    Args:
        send_tensor: nranks x n elements; unused on other ranks than `src`, which may give None.
        recv_tensor: n elements of the same dtype.
        src: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `gather`.
    """
    found = resolve(comm, "scatter")
    if found is None:
        return
    checks = Checks("scatter", found)
    recv, src = checks.flat("recv_tensor", recv_tensor), checks.peer("src", src)
    send = None
    if found.rank() == src or send_tensor is not None:
        send = checks.flat("send_tensor", send_tensor)
        checks.alike("send_tensor", send, "recv_tensor", recv)
        checks.elements("send_tensor", send, found.nranks() * recv.numel(), f"{found.nranks()} x those of recv_tensor")
    with found.blocking(recv):
        inputs = None if send is None or found.rank() != src else _parts(send, found)
        dist.scatter(recv, inputs, group=found.torch_group, group_src=src)


def scatter_inplace(tensor: Tensor, count: int, src: int, comm: Comm = None) -> None:
    """As `scatter`; on rank `src` its own elements stay in their place in `tensor`.

    Args:
        tensor: on rank `src` nranks x `count` elements; elsewhere `count`, which are overwritten.
        count: number of elements for each rank.
        src: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `gather`.
    """
    found = resolve(comm, "scatter")
    if found is None:
        return
    checks = Checks("scatter", found)
    count, src = checks.count("count", count), checks.peer("src", src)
    flat = _rooted(checks, found, tensor, count, src)
    with found.blocking(flat):
        if found.rank() == src:
            dist.scatter(flat.new_empty(count), _parts(flat, found), group=found.torch_group, group_src=src)
        else:
            dist.scatter(flat, None, group=found.torch_group, group_src=src)


def _rooted(checks: Checks, comm: Communicator, tensor: Tensor, count: int, root: int) -> Tensor:
    flat = checks.flat("tensor", tensor)
    if comm.rank() == root:
        checks.elements("tensor", flat, comm.nranks() * count, f"{comm.nranks()} x count, on the root")
    else:
        checks.elements("tensor", flat, count, "count, on ranks other than the root")
    return flat


def alltoall(send_tensor: Tensor, recv_tensor: Tensor, comm: Comm = None) -> None:
    """Rank r gets the r-th part of every rank's `send_tensor`, in the order of the ranks.

    Args:
        send_tensor: nranks x n elements.
        recv_tensor: as many of the same dtype.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: other numbers of elements, dtypes or devices, or a tensor that is not contiguous.
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "alltoall")
    if found is None:
        return
    checks = Checks("alltoall", found)
    send, recv = checks.flat("send_tensor", send_tensor), checks.flat("recv_tensor", recv_tensor)
    checks.alike("recv_tensor", recv, "send_tensor", send)
    checks.elements("recv_tensor", recv, send.numel(), "as many as send_tensor")
    checks.chunk("send_tensor", send)
    with found.blocking(send):
        dist.all_to_all_single(recv, send, group=found.torch_group)


def alltoall_inplace(tensor: Tensor, comm: Comm = None) -> None:
    """As `alltoall`, with `tensor` as input and output.

    Args:
        tensor: nranks x n elements.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `alltoall`.
    """
    found = resolve(comm, "alltoall")
    if found is None:
        return
    checks = Checks("alltoall", found)
    flat = checks.flat("tensor", tensor)
    checks.chunk("tensor", flat)
    with found.blocking(flat):
        dist.all_to_all_single(flat, flat.clone(), group=found.torch_group)


def alltoall_v(
    send_tensor: Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """Send to rank r `send_counts[r]` elements of `send_tensor` from element `send_displs[r]` on.

    What comes from rank r is put into `recv_tensor`, from element `recv_displs[r]` on; elements that no piece covers
    keep their values.

    Args:
        send_tensor: what is sent.
        send_counts: numbers of elements, one per rank; may be 0.
        send_displs: where the piece for each rank begins, in elements.
        recv_tensor: of the same dtype; may be `send_tensor`.
        recv_counts: as many as the other rank sends.
        recv_displs: where the piece from each rank begins.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError: counts and displacements that are not one per rank or leave their tensor, another dtype or device,
            or a tensor that is not contiguous.
        RuntimeError: before `init_process_group`.
    """
    found = resolve(comm, "alltoall_v")
    if found is None:
        return
    checks = Checks("alltoall_v", found)
    send, recv = checks.flat("send_tensor", send_tensor), checks.flat("recv_tensor", recv_tensor)
    checks.alike("recv_tensor", recv, "send_tensor", send)
    inputs = checks.pieces("send_tensor", send, send_counts, send_displs)
    outputs = checks.pieces("recv_tensor", recv, recv_counts, recv_displs)
    with found.blocking(send):
        _exchange_pieces(found, inputs, outputs)


def alltoall_v_inplace(tensor: Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None) -> None:
    """As `alltoall_v` with one tensor, whose pieces are sent and then overwritten by what comes from the same rank.

    Args:
        tensor: input and output.
        counts: numbers of elements, one per rank; two ranks send each other equally many.
        displs: where the piece of each rank begins, in elements.
        comm: a communicator; by default all ranks of the default group.

    Raises:
        ValueError, RuntimeError: as `alltoall_v`.
    """
    found = resolve(comm, "alltoall_v")
    if found is None:
        return
    checks = Checks("alltoall_v", found)
    pieces = checks.pieces("tensor", checks.flat("tensor", tensor), counts, displs)
    with found.blocking(tensor):
        _exchange_pieces(found, pieces, pieces)


def _exchange_pieces(comm: Communicator, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    # Packed: Gloo has no all-to-all of lists, and pieces may lie anywhere.
    receiving = [piece.numel() for piece in outputs]
    received = outputs[0].new_empty(sum(receiving))
    dist.all_to_all_single(
        received, torch.cat(inputs), receiving, [piece.numel() for piece in inputs], group=comm.torch_group
    )
    for output, piece in zip(outputs, torch.split(received, receiving), strict=True):
        output.copy_(piece)


def _part(flat: Tensor, rank: int, count: int) -> Tensor:
    return flat[rank * count : (rank + 1) * count]


def _parts(flat: Tensor, comm: Communicator) -> list[Tensor]:
    return list(flat.view(comm.nranks(), flat.numel() // comm.nranks()).unbind())
