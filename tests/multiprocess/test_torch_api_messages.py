# SPDX-License-Identifier: Apache-2.0
"""bagua.torch_api: coalesced calls, objects, messages, barriers, and tensors of every kind."""

from pathlib import Path

import bagua.torch_api as api
import torch
from ranks import on_ranks
from reference import DTYPES, assert_reduced, values
from torch import Tensor
from torch_api_calls import exactly, from_all, started


@on_ranks("ranks")
def test_coalesced_collectives_equal_one_call_per_tensor() -> None:
    rank, size = started()

    def mine(rank: int) -> list[Tensor]:
        tensors = [values(dtype, (2, 3), rank) for dtype in (torch.float32, torch.int64, torch.float32)]
        # Not row-major: its elements have to come back to their places.
        return [*tensors, values(torch.float32, (4, 3), rank).t(), torch.empty(0, dtype=torch.int64)]

    everyone = [mine(one) for one in range(size)]
    tensors = mine(rank)
    api.allreduce_coalesced_inplace(tensors, api.ReduceOp.SUM)
    for index, tensor in enumerate(tensors):
        assert_reduced(tensor, [one[index] for one in everyone], "SUM")
    tensors = mine(rank)
    api.broadcast_coalesced(tensors, src=size - 1)
    for tensor, expected in zip(tensors, everyone[-1], strict=True):
        exactly(tensor, expected)
    api.allreduce_coalesced_inplace([])


@on_ranks("ranks")
def test_broadcast_object_returns_the_root_s_object_everywhere() -> None:
    rank, size = started()
    for root in range(size):
        given = {"from": rank, "list": [rank] * 3}
        assert api.broadcast_object(given, root) == {"from": root, "list": [root] * 3}
    assert api.broadcast_object(f"rank {rank}") == "rank 0"
    assert api.broadcast_object(None, src=size - 1) is None


@on_ranks("peers")
def test_send_and_recv() -> None:
    rank, size = started()
    for dtype in DTYPES:
        inputs = from_all(dtype, (2, 3))
        received = torch.zeros(6, dtype=dtype)
        # Around the ring; rank 0 sends first, the others once they have received.
        if rank == 0:
            api.send(inputs[0], 1)
        api.recv(received, src=(rank - 1) % size)
        if rank != 0:
            api.send(inputs[rank], dst=(rank + 1) % size)
        exactly(received.view(2, 3), inputs[(rank - 1) % size])


@on_ranks("ranks")
def test_nobody_passes_a_barrier_before_all_have_come(tmp_path: Path) -> None:
    rank, size = started()
    for turn in range(3):
        Path(tmp_path, f"{turn}-{rank}").touch()
        api.barrier()
        assert len(list(tmp_path.glob(f"{turn}-*"))) == size


@on_ranks("ranks")
def test_parameters_are_changed_in_place() -> None:
    """In place on a leaf that requires a gradient, which autograd would refuse."""
    rank, size = started()
    parameter = torch.nn.Parameter(torch.full((2, size), float(rank)))
    api.allreduce(parameter)
    assert parameter.tolist() == [[float(sum(range(size)))] * size] * 2
    api.broadcast_coalesced([parameter])
    api.allgather_inplace(parameter)
    api.alltoall_inplace(parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf


@on_ranks("ranks")
def test_empty_tensors_pass_through_every_collective() -> None:
    _, size = started()
    empty = torch.empty(0)
    api.allreduce(empty)
    api.allreduce(empty, empty.clone())
    api.reduce(empty, 0)
    api.broadcast(empty, size - 1)
    api.allgather(empty, empty.clone())
    api.allgather_inplace(empty)
    api.gather(empty, empty.clone(), 0)
    api.gather_inplace(empty, 0, 0)
    api.scatter(empty, empty.clone(), 0)
    api.scatter_inplace(empty, 0, 0)
    api.reduce_scatter(empty, empty.clone())
    api.reduce_scatter_inplace(empty)
    api.alltoall(empty, empty.clone())
    api.alltoall_inplace(empty)
    api.alltoall_v(empty, [0] * size, [0] * size, empty.clone(), [0] * size, [0] * size)
    tensor = torch.ones(2)
    api.allreduce(tensor)
    assert tensor.tolist() == [size, size]
