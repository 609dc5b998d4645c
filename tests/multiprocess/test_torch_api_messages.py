# SPDX-License-Identifier: Apache-2.0
"""bagua.torch_api: barriers, and tensors of every kind."""

from pathlib import Path

import bagua.torch_api as api
import torch
from ranks import on_ranks
from torch_api_calls import started


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
    api.broadcast(parameter)
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
    tensor = torch.ones(2)
    api.allreduce(tensor)
    assert tensor.tolist() == [size, size]
