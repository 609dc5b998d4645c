# SPDX-License-Identifier: Apache-2.0
"""Sharded models that torch.compile or tensor parallelism has changed: what FSDP2 itself would have computed, coded."""

from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import same_everywhere
from ranks import on_new_ranks, on_ranks
from reference import for_each
from sharded_models import error_of, gradients_of, loss_of, made_model, mesh_of, trained
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@pytest.mark.parametrize(
    ("mesh_name", "weights", "way"), [("hybrid", None, "layers before"), ("line", "int8", "whole after")]
)
@on_ranks(4)
def test_compiled_models_are_coded(mesh_name: str, weights: str | None, way: str) -> None:
    mesh = mesh_of(mesh_name)
    torch._dynamo.reset()
    counters.clear()
    trainings = []
    for is_coded in (False, True):
        model: Any = made_model()
        for block in model.blocks:
            if is_coded and way == "layers before":
                block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if is_coded:
            handle = bagua.fsdp.compress(model, "int8", weights=weights, exact=())
        run = torch.compile(model, backend="aot_eager") if is_coded and way == "whole after" else model
        # Weights stay, so that no step inherits the error of another.
        trainings.append(trained(model, step=lambda _, number, run=run: loss_of(run, number).backward(), rate=0))
    assert 0.001 < error_of(trainings[1], trainings[0]) < 0.015
    assert handle.stats()["wire_bytes_between_hosts"] < 0.6 * handle.stats()["logical_bytes"]
    assert counters["stats"]["calls_captured"] > 0


PARALLEL: list[tuple[tuple[int, ...], str | None]] = [((2, 1, 2), None), ((1, 2, 2), None), ((2, 2), "int8")]


# New ranks, which keep the groups of all meshes until they end: DTensor remembers a mesh for as long.
@on_new_ranks(4, env={"BAGUA_HOST_ID": ["a", "a", "b", "b"]})
@for_each(PARALLEL)
def test_parts_of_tensor_parallelism_are_reduced_with_their_like(case: tuple[tuple[int, ...], str | None]) -> None:
    shape, weights = case
    names = ("replicate", "shard", "tp")[-len(shape) :]
    mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def built() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in range(2)))
        for block in model:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(block, mesh=mesh[names[:-1]])
        return fully_shard(model, mesh=mesh[names[:-1]])

    def step(model: Any, number: int) -> None:
        torch.manual_seed(10 * number + dist.get_rank() // 2)
        model(torch.randn(8, 64)).square().sum().backward()

    stock, ours = built(), built()
    handle = bagua.fsdp.compress(ours, "4bit", weights=weights, exact=(), guard=None)
    error = error_of(trained(ours, step=step, rate=0), trained(stock, step=step, rate=0))
    stats = handle.stats()
    if shape[0] == 1:
        assert error == 0
        assert stats["wire_bytes"] < 100  # what ranks agree on
    else:
        assert 0.01 < error < 0.2, error
        assert 0 < stats["wire_bytes"] < 0.2 * stats["logical_bytes"]
    both = [gradient for name, gradient in gradients_of(ours).items() if name.endswith("2.bias")]
    assert same_everywhere(*both, group=mesh.get_group("tp"))
