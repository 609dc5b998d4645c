# SPDX-License-Identifier: Apache-2.0
"""Collectives that move elements without changing them: allgather, gather, scatter, alltoall.

Tensors are taken as flat, in row-major order; only their numbers of elements matter. `comm` and errors: see
`bagua.torch_api.communication`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.torch_api._checks import Checks
from bagua.torch_api._collective import collective
from bagua.torch_api._communicators import Comm


@collective("allgather")
def allgather(checks: Checks, send_tensor: Tensor, recv_tensor: Tensor, comm: Comm = None) -> None:
    """Every rank gets the `send_tensor` of all ranks, n elements each, one after the other in `recv_tensor`."""
    send, recv = checks.flat("send_tensor", send_tensor), checks.flat("recv_tensor", recv_tensor)
    checks.multiple("recv_tensor", recv, "send_tensor", send)
    dist.all_gather_into_tensor(recv, send, group=checks.group)


@collective("allgather")
def allgather_inplace(checks: Checks, tensor: Tensor, comm: Comm = None) -> None:
    """As `allgather`, with what rank r sends in the r-th part of its `tensor`."""
    flat = checks.flat("tensor", tensor)
    checks.chunk("tensor", flat)
    dist.all_gather_into_tensor(flat, _parts(checks, flat)[checks.rank].clone(), group=checks.group)


@collective("gather")
def gather(checks: Checks, send_tensor: Tensor, recv_tensor: Tensor | None, dst: int, comm: Comm = None) -> None:
    """Rank `dst` gets the `send_tensor` of all ranks, n elements each, one after the other in `recv_tensor`.

    Other ranks do not use `recv_tensor`, and may give None.
    """
    send, dst = checks.flat("send_tensor", send_tensor), checks.peer("dst", dst)
    recv = None
    # A wrong size is most likely wrong on every rank: better that all see it than that they wait for the root.
    if checks.rank == dst or recv_tensor is not None:
        recv = checks.flat("recv_tensor", recv_tensor)
        checks.multiple("recv_tensor", recv, "send_tensor", send)
    outputs = None if recv is None or checks.rank != dst else _parts(checks, recv)
    dist.gather(send, outputs, group=checks.group, group_dst=dst)


@collective("gather")
def gather_inplace(checks: Checks, tensor: Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """As `gather`, with `count` elements of each rank.

    On rank `dst` the `tensor` holds those of all ranks, and its own are in their place already.
    """
    count, dst = checks.count("count", count), checks.peer("dst", dst)
    flat = _rooted(checks, tensor, count, dst)
    outputs = _parts(checks, flat) if checks.rank == dst else None
    dist.gather(flat if outputs is None else outputs[dst].clone(), outputs, group=checks.group, group_dst=dst)


@collective("scatter")
def scatter(checks: Checks, send_tensor: Tensor | None, recv_tensor: Tensor, src: int, comm: Comm = None) -> None:
    """Rank r gets the r-th part of the `send_tensor` of rank `src`; other ranks may give None for it."""
    recv, src = checks.flat("recv_tensor", recv_tensor), checks.peer("src", src)
    send = None
    if checks.rank == src or send_tensor is not None:
        send = checks.flat("send_tensor", send_tensor)
        checks.multiple("send_tensor", send, "recv_tensor", recv)
    inputs = None if send is None or checks.rank != src else _parts(checks, send)
    dist.scatter(recv, inputs, group=checks.group, group_src=src)


@collective("scatter")
def scatter_inplace(checks: Checks, tensor: Tensor, count: int, src: int, comm: Comm = None) -> None:
    """As `scatter`, with `count` elements for each rank.

    On rank `src` the `tensor` holds those for all ranks, and its own stay in their place.
    """
    count, src = checks.count("count", count), checks.peer("src", src)
    flat = _rooted(checks, tensor, count, src)
    inputs = _parts(checks, flat) if checks.rank == src else None
    dist.scatter(flat if inputs is None else flat.new_empty(count), inputs, group=checks.group, group_src=src)


def _rooted(checks: Checks, tensor: Tensor, count: int, root: int) -> Tensor:
    flat = checks.flat("tensor", tensor)
    if checks.rank == root:
        checks.elements("tensor", flat, checks.nranks * count, f"{checks.nranks} x count, on the root")
    else:
        checks.elements("tensor", flat, count, "count, on ranks other than the root")
    return flat


@collective("alltoall")
def alltoall(checks: Checks, send_tensor: Tensor, recv_tensor: Tensor, comm: Comm = None) -> None:
    """Rank r gets the r-th part of every rank's `send_tensor`, in the order of the ranks."""
    send, recv = checks.flat("send_tensor", send_tensor), checks.flat("recv_tensor", recv_tensor)
    checks.as_many("recv_tensor", recv, "send_tensor", send)
    checks.chunk("send_tensor", send)
    dist.all_to_all_single(recv, send, group=checks.group)


@collective("alltoall")
def alltoall_inplace(checks: Checks, tensor: Tensor, comm: Comm = None) -> None:
    """As `alltoall`, with `tensor` as input and output."""
    flat = checks.flat("tensor", tensor)
    checks.chunk("tensor", flat)
    dist.all_to_all_single(flat, flat.clone(), group=checks.group)


@collective("alltoall_v")
def alltoall_v(
    checks: Checks,
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
    keep their values. Counts may be 0, and `recv_tensor` may be `send_tensor`.
    """
    send, recv = checks.flat("send_tensor", send_tensor), checks.flat("recv_tensor", recv_tensor)
    checks.alike("recv_tensor", recv, "send_tensor", send)
    inputs = checks.pieces("send_tensor", send, send_counts, send_displs)
    outputs = checks.pieces("recv_tensor", recv, recv_counts, recv_displs)
    _exchange_pieces(checks, inputs, outputs)


@collective("alltoall_v")
def alltoall_v_inplace(
    checks: Checks, tensor: Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None
) -> None:
    """As `alltoall_v` with one tensor, whose pieces are sent and then overwritten by what comes from the same rank."""
    pieces = checks.pieces("tensor", checks.flat("tensor", tensor), counts, displs)
    _exchange_pieces(checks, pieces, pieces)


def _exchange_pieces(checks: Checks, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    # Packed: Gloo has no all-to-all of lists, and pieces may lie anywhere.
    receiving = [piece.numel() for piece in outputs]
    received = outputs[0].new_empty(sum(receiving))
    sending = [piece.numel() for piece in inputs]
    dist.all_to_all_single(received, torch.cat(inputs), receiving, sending, group=checks.group)
    for output, piece in zip(outputs, torch.split(received, receiving), strict=True):
        output.copy_(piece)


def _parts(checks: Checks, flat: Tensor) -> list[Tensor]:
    return list(flat.view(checks.nranks, flat.numel() // checks.nranks).unbind())
