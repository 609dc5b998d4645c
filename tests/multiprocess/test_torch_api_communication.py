# SPDX-License-Identifier: Apache-2.0
"""The collectives of bagua.torch_api: both documented generations of signatures, every dtype, any communicator."""

import itertools
from collections.abc import Sequence
from typing import Any

import bagua.torch_api as api
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import communication
from bagua.torch_api.communication import CommMember
from ranks import on_ranks
from reference import DTYPES, OPERATIONS, assert_reduced, dtypes_of, for_each, reduce_op, values
from torch_api_calls import exactly, from_all, started


@pytest.mark.parametrize("op", OPERATIONS)
@on_ranks("ranks")
def test_allreduce_in_place_and_out_of_place_with_either_enum(op: str) -> None:
    rank, _ = started()
    for dtype, kind in itertools.product(dtypes_of(op), ("ours", "number", "torch's")):
        if op == "PRODUCT" and dtype.is_complex:  # torch refuses it before any backend sees it
            continue
        ours = api.ReduceOp[op]
        given: Any = {"ours": ours, "number": int(ours), "torch's": reduce_op(op)}[kind]
        inputs = from_all(dtype, (5, 7), op)
        tensor = inputs[rank].clone()
        assert api.allreduce(tensor, given) is None  # type: ignore[func-returns-value]
        assert_reduced(tensor, inputs, op)
        tensor = inputs[rank].clone()
        api.allreduce_inplace(tensor, op=given)
        assert_reduced(tensor, inputs, op)
        send, recv = inputs[rank].clone(), torch.zeros(35, dtype=dtype)
        api.allreduce(send, recv, given)
        assert_reduced(recv.view(5, 7), inputs, op)
        exactly(send, inputs[rank])


@on_ranks("ranks")
def test_allreduce_takes_every_documented_form_of_call() -> None:
    rank, size = started()
    total = float(sum(range(size)))
    comm = communication.from_torch_group(None).get_global_communicator()
    calls: list[Any] = [
        lambda t: api.allreduce(t),
        lambda t: api.allreduce(tensor=t),
        lambda t: api.allreduce(t, dist.ReduceOp.SUM, None),
        lambda t: api.allreduce(t, op=api.ReduceOp.SUM, comm=comm),
        lambda t: api.allreduce(t, comm=CommMember.WORLD),
        lambda t: api.allreduce(t, t),
        lambda t: api.allreduce(t, t, api.ReduceOp.SUM, comm),
        lambda t: api.allreduce(send_tensor=t, recv_tensor=t, op=dist.ReduceOp.SUM),
        lambda t: api.allreduce(t, recv_tensor=t, comm=comm),
    ]
    for index, call in enumerate(calls):
        tensor = torch.full((3,), float(rank))
        call(tensor)
        assert tensor.tolist() == [total] * 3, index


@pytest.mark.parametrize(
    ("op", "dtype"), [("SUM", torch.int64), ("AVG", torch.float32), ("MAX", torch.bfloat16), ("BXOR", torch.bool)]
)
@on_ranks("ranks")
def test_reduce_to_every_root_in_both_generations_of_calls(op: str, dtype: torch.dtype) -> None:
    rank, size = started()
    inputs = from_all(dtype, (37,), op)
    for root in range(size):
        calls: list[Any] = [
            lambda t, _, root=root: api.reduce(t, root, api.ReduceOp[op]),
            lambda t, _, root=root: api.reduce(t, dst=root, op=reduce_op(op)),
            lambda t, _, root=root: api.reduce_inplace(t, root, api.ReduceOp[op]),
            lambda t, r, root=root: api.reduce(t, r, root, api.ReduceOp[op]),
            lambda t, r, root=root: api.reduce(send_tensor=t, recv_tensor=r, dst=root, op=reduce_op(op)),
            lambda t, r, root=root: api.reduce(t, r if rank == root else None, root, api.ReduceOp[op]),
        ]
        for index, call in enumerate(calls):
            send, recv = inputs[rank].clone(), torch.zeros(37, dtype=dtype)
            call(send, recv)
            is_in_place = index < 3
            if rank == root:
                assert_reduced(send if is_in_place else recv, inputs, op)
            if not is_in_place:
                exactly(send, inputs[rank])
                assert rank == root or not recv.any()


@on_ranks("ranks")
@for_each(DTYPES)
def test_broadcast_takes_root_and_src(dtype: torch.dtype) -> None:
    rank, size = started()
    inputs = from_all(dtype, (5, 7))
    calls: list[Any] = [
        lambda t, root: api.broadcast(t, root),
        lambda t, root: api.broadcast(t, root=root),
        lambda t, root: api.broadcast(t, src=root),
        lambda t, root: api.broadcast(t, root, None, src=root),
    ]
    for root in range(size):
        for call in calls:
            tensor = inputs[rank].clone()
            call(tensor, root)
            exactly(tensor, inputs[root])
    tensor = inputs[rank].clone()
    api.broadcast(tensor)
    exactly(tensor, inputs[0])


@on_ranks("ranks")
@for_each(DTYPES)
def test_allgather_and_gather(dtype: torch.dtype) -> None:
    rank, size = started()
    inputs = from_all(dtype, (2, 3))
    joined = torch.stack(inputs)
    zeros = torch.zeros(size, 2, 3, dtype=dtype)

    recv = zeros.clone()
    api.allgather(inputs[rank], recv)
    exactly(recv, joined)
    recv = zeros.clone()
    recv[rank] = inputs[rank]
    api.allgather_inplace(recv)
    exactly(recv, joined)
    for root in range(size):
        recv = zeros.clone()
        api.gather(inputs[rank], recv, root)
        exactly(recv, joined if rank == root else zeros)
        api.gather(inputs[rank], recv if rank == root else None, dst=root)
        if rank == root:
            tensor = zeros.clone()
            tensor[root] = inputs[root]
        else:
            tensor = inputs[rank].clone()
        api.gather_inplace(tensor, 6, root)
        exactly(tensor, joined if rank == root else inputs[rank])


@on_ranks("ranks")
@for_each(DTYPES)
def test_scatter(dtype: torch.dtype) -> None:
    rank, size = started()
    for root in range(size):
        # What the root sends: row r for rank r.
        whole = values(dtype, (size, 2, 3), root)
        sent = whole.clone() if rank == root else torch.zeros_like(whole)
        recv = torch.zeros(2, 3, dtype=dtype)
        api.scatter(sent, recv, root)
        exactly(recv, whole[rank])
        recv.zero_()
        api.scatter(sent if rank == root else None, recv, src=root)
        exactly(recv, whole[rank])
        tensor = whole.clone() if rank == root else torch.zeros(6, dtype=dtype)
        api.scatter_inplace(tensor, 6, root)
        exactly(tensor.view(-1), whole.view(-1) if rank == root else whole[rank].view(-1))


@pytest.mark.parametrize(("op", "dtype"), [("SUM", torch.int32), ("AVG", torch.float64), ("MIN", torch.float16)])
@on_ranks("ranks")
def test_reduce_scatter_leaves_the_result_in_the_first_part(op: str, dtype: torch.dtype) -> None:
    rank, size = started()
    inputs = from_all(dtype, (size, 5), op)
    mine = [one[rank] for one in inputs]
    send, recv = inputs[rank].clone(), torch.zeros(5, dtype=dtype)
    api.reduce_scatter(send, recv, api.ReduceOp[op])
    assert_reduced(recv, mine, op)
    exactly(send, inputs[rank])
    api.reduce_scatter_inplace(send, reduce_op(op))
    assert_reduced(send[0], mine, op)
    exactly(send[1:], inputs[rank][1:])


@on_ranks("ranks")
@for_each(DTYPES)
def test_alltoall(dtype: torch.dtype) -> None:
    rank, size = started()
    inputs = from_all(dtype, (size, 3))
    expected = torch.stack([one[rank] for one in inputs])
    recv = torch.zeros(size, 3, dtype=dtype)
    api.alltoall(inputs[rank], recv)
    exactly(recv, expected)
    tensor = inputs[rank].clone()
    api.alltoall_inplace(tensor)
    exactly(tensor, expected)


@on_ranks("ranks")
def test_alltoall_v_keeps_what_no_piece_covers() -> None:
    rank, size = started()
    # Rank i sends (i + 2 j) % 3 elements of value 10 i + j to rank j; pieces lie in reversed order, one element apart.
    counts = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    receiving = [counts[i][rank] for i in range(size)]

    def places(pieces: Sequence[int]) -> list[int]:
        return [sum(pieces[peer + 1 :]) + size - 1 - peer for peer in range(size)]

    send = torch.full((sum(counts[rank]) + size,), -1.0)
    for peer, (count, place) in enumerate(zip(counts[rank], places(counts[rank]), strict=True)):
        send[place : place + count] = 10 * rank + peer
    recv = torch.full((sum(receiving) + size,), -2.0)
    api.alltoall_v(send, counts[rank], places(counts[rank]), recv, receiving, places(receiving))
    expected = torch.full_like(recv, -2.0)
    for peer, (count, place) in enumerate(zip(receiving, places(receiving), strict=True)):
        expected[place : place + count] = 10 * peer + rank
    exactly(recv, expected)


@on_ranks("ranks")
def test_alltoall_v_inplace_swaps_pieces() -> None:
    rank, size = started()
    counts = [1 + (rank + peer) % 2 for peer in range(size)]
    displs = [2 * peer for peer in range(size)]
    tensor = torch.full((2 * size,), -1.0)
    for peer in range(size):
        tensor[displs[peer] : displs[peer] + counts[peer]] = 10 * rank + peer
    api.alltoall_v_inplace(tensor, counts, torch.tensor(displs).tolist())
    expected = torch.full_like(tensor, -1.0)
    for peer in range(size):
        expected[displs[peer] : displs[peer] + counts[peer]] = 10 * peer + rank
    exactly(tensor, expected)
