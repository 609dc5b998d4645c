# SPDX-License-Identifier: Apache-2.0
"""The collectives of bagua.torch_api: both documented generations of signatures, every dtype, any communicator."""

import itertools
from pathlib import Path
from typing import Any

import bagua.torch_api as api
import torch
import torch.distributed as dist
from bagua.torch_api import communication
from bagua.torch_api.communication import CommMember
from ranks import on_ranks
from reference import DTYPES, OPERATIONS, assert_reduced, dtypes_of, for_each, reduce_op
from torch_api_calls import exactly, from_all, started


@on_ranks(3)
@for_each(OPERATIONS)
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


@on_ranks(3)
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


@on_ranks(3)
@for_each([("SUM", torch.int64), ("AVG", torch.float32), ("MAX", torch.bfloat16), ("BXOR", torch.bool)])
def test_reduce_to_every_root_in_both_generations_of_calls(case: tuple[str, torch.dtype]) -> None:
    (op, dtype), (rank, size) = case, started()
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


@on_ranks(3)
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


@on_ranks(3)
def test_parameters_are_changed_in_place() -> None:
    """In place on a leaf that requires a gradient, which autograd would refuse."""
    rank, size = started()
    parameter = torch.nn.Parameter(torch.full((2, size), float(rank)))
    api.allreduce(parameter)
    assert parameter.tolist() == [[float(sum(range(size)))] * size] * 2
    api.broadcast(parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf


@on_ranks(3)
def test_nobody_passes_a_barrier_before_all_have_come(tmp_path: Path) -> None:
    rank, size = started()
    for turn in range(3):
        Path(tmp_path, f"{turn}-{rank}").touch()
        api.barrier()
        assert len(list(tmp_path.glob(f"{turn}-*"))) == size
