# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of bagua.torch_api's collectives: an exception before anything is sent that says what was wrong."""

from collections.abc import Callable
from typing import Any

import bagua.torch_api as api
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from reference import for_each
from torch_api_calls import started


def _floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


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
    ("broadcast", lambda size: api.broadcast(_floats(2), 1, src=0), "got root=1 and src=0"),
]


@on_ranks(2)
@for_each(WRONG)
def test_wrong_arguments_are_named_and_the_group_stays_usable(case: tuple[str, Callable[[int], Any], str]) -> None:
    (operation, call, text), (rank, size) = case, started()
    with pytest.raises((ValueError, TypeError)) as caught:
        call(size)
    message = str(caught.value)
    assert message.startswith(f"{operation} on rank {rank} of {size}: "), message
    assert text.format(size=size, last=size - 1) in message, message
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
