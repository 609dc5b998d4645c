# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of bagua.torch_api's collectives: an exception before anything is sent that says what was wrong."""

from collections.abc import Callable
from typing import Any

import bagua.torch_api as api
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from reference import named
from torch_api_calls import started


def _floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def _columns() -> torch.Tensor:
    """Not contiguous."""
    return torch.zeros(4, 6).t()


# The operation, a wrong call of it, with the number of ranks, and what the message has to hold.
WRONG: list[tuple[str, Callable[[int], Any], str]] = [
    ("allreduce", lambda size: api.allreduce([1.0]), "tensor must be a tensor, got list"),
    ("allreduce", lambda size: api.allreduce(torch.eye(3).to_sparse()), "dense tensor, got layout torch.sparse_coo"),
    (
        "allreduce",
        lambda size: api.allreduce(_floats(2, 3), _floats(5)),
        "recv_tensor must have 6 elements (as many as send_tensor), got 5 of shape (5,)",
    ),
    (
        "allreduce",
        lambda size: api.allreduce(_floats(2), torch.zeros(2, dtype=torch.int64)),
        "recv_tensor must be torch.float32 on cpu as send_tensor, got torch.int64 on cpu",
    ),
    (
        "allreduce",
        lambda size: api.allreduce(_floats(2), 5),
        "op must be a bagua.torch_api.ReduceOp (SUM (0), PRODUCT (1),",
    ),
    ("allreduce", lambda size: api.allreduce(_floats(2), True), "got True"),
    ("reduce", lambda size: api.reduce(_floats(2), 0, "sum"), "got 'sum'"),
    (
        "reduce",
        lambda size: api.reduce(_floats(2), size),
        "dst must be a rank of the communicator, 0 to {last}, got {size}",
    ),
    (
        "reduce",
        lambda size: api.reduce(_floats(2), None, dist.get_rank()),
        "recv_tensor must be a tensor, got NoneType",
    ),
    (
        "broadcast",
        lambda size: api.broadcast(_floats(2), -1),
        "root must be a rank of the communicator, 0 to {last}, got -1",
    ),
    (
        "allgather",
        lambda size: api.allgather(_floats(3), _floats(3 * size + 1)),
        "recv_tensor must have {three} elements ({size} x those of send_tensor)",
    ),
    (
        "allgather",
        lambda size: api.allgather(_columns(), _floats(24 * size)),
        "send_tensor must be contiguous, got shape (6, 4) with strides (1, 6)",
    ),
    ("gather", lambda size: api.gather(_floats(3), _floats(3 * size + 1), 0), "recv_tensor must have {three} elements"),
    (
        "gather",
        lambda size: api.gather_inplace(_floats(3), -1, 0),
        "count must be a number of elements, 0 or more, got -1",
    ),
    ("gather", lambda size: api.gather_inplace(_floats(3 * size + 1), 3, 0), "elements ("),
    (
        "scatter",
        lambda size: api.scatter(_floats(3 * size + 1), _floats(3), 0),
        "send_tensor must have {three} elements",
    ),
    ("scatter", lambda size: api.scatter_inplace(_floats(3), 3, "0"), "got '0'"),
    (
        "reduce_scatter",
        lambda size: api.reduce_scatter(_floats(3 * size + 1), _floats(3)),
        "send_tensor must have {three} elements ({size} x those of recv_tensor)",
    ),
    ("alltoall", lambda size: api.alltoall(_floats(size), _floats(2 * size)), "recv_tensor must have {size} elements"),
    (
        "alltoall_v",
        lambda size: api.alltoall_v(_floats(9), [1] * (size + 1), [0] * (size + 1), _floats(9), [1] * size, [0] * size),
        "of send_tensor must be {size} numbers each",
    ),
    (
        "alltoall_v",
        lambda size: api.alltoall_v_inplace(_floats(9), [3] * size, [7] * size),
        "the piece of tensor for rank 0 must lie within its 9 elements, got 3 from element 7 on",
    ),
    (
        "allreduce_coalesced",
        lambda size: api.allreduce_coalesced_inplace(_floats(3)),
        "tensors must be a sequence of tensors, got a tensor",
    ),
    (
        "broadcast_coalesced",
        lambda size: api.broadcast_coalesced([_floats(3), None]),  # type: ignore[list-item]
        "tensors[1] must be a tensor, got NoneType",
    ),
    ("send", lambda size: api.send(_floats(3), size), "got {size}"),
    ("send", lambda size: api.send(_floats(3), dist.get_rank()), "dst must be another rank, got {rank}"),
    ("recv", lambda size: api.recv(_floats(3), -1), "got -1"),
    ("broadcast_object", lambda size: api.broadcast_object("it", size), "got {size}"),
]

# Where every size fits one rank.
NEEDS_PEERS: list[tuple[str, Callable[[int], Any], str]] = [
    (
        "allgather",
        lambda size: api.allgather_inplace(_floats(size + 1)),
        "must be a multiple of {size}, the number of ranks, got {more} of shape ({more},)",
    ),
    ("alltoall", lambda size: api.alltoall_inplace(_floats(size + 1)), "must be a multiple of {size}"),
    ("reduce_scatter", lambda size: api.reduce_scatter_inplace(_floats(size + 1)), "must be a multiple of {size}"),
    ("broadcast", lambda size: api.broadcast(_floats(2), 1, src=0), "got root=1 and src=0"),
]


@on_ranks("ranks")
def test_wrong_arguments_are_named_and_the_group_stays_usable() -> None:
    rank, size = started()
    for operation, call, text in WRONG + (NEEDS_PEERS if size > 1 else []):
        with named(operation, text):
            with pytest.raises((ValueError, TypeError)) as caught:
                call(size)
            message = str(caught.value)
            assert message.startswith(f"{operation} on rank {rank} of {size}: "), message
            assert text.format(size=size, last=size - 1, three=3 * size, more=size + 1, rank=rank) in message, message
            tensor = torch.ones(2)
            api.allreduce(tensor)
            assert tensor.tolist() == [size, size]


@on_ranks(1)
def test_arguments_of_neither_generation_are_refused() -> None:
    started()
    for call in (
        lambda: api.allreduce(torch.ones(1), average=True),  # type: ignore[call-overload]
        lambda: api.allreduce(send_tensor=torch.ones(1)),  # type: ignore[call-overload]
        lambda: api.reduce(torch.ones(1)),  # type: ignore[call-overload]
    ):
        with pytest.raises(TypeError):
            call()
