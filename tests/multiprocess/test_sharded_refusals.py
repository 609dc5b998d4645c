# SPDX-License-Identifier: Apache-2.0
"""bagua.fsdp.compress refuses what it cannot do right, and says what."""

from contextlib import nullcontext
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from reference import named
from sharded_models import compressed, loss_of, made_model, mesh_of, sharded
from torch import nn


@pytest.mark.parametrize("mesh_name", ["hybrid", "line"])
@on_ranks(4)
def test_what_only_a_backward_shows_is_refused_there(mesh_name: str) -> None:
    mesh = mesh_of(mesh_name)
    part = sharded(made_model(), mesh)
    bagua.fsdp.compress(part.blocks[0], "int8")
    with pytest.raises(ValueError, match="outermost module"):
        loss_of(part, 0).backward()
    hooked = compressed(sharded(made_model(), mesh))
    hooked.set_all_reduce_hook(lambda _: None)
    with pytest.raises(ValueError, match="set_all_reduce_hook"):
        loss_of(hooked, 0).backward()


@on_ranks(4)
def test_what_cannot_be_done_right_is_refused_with_its_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, model = mesh_of(), made_model()
    line = init_device_mesh("cpu", (4,))
    simple = nn.Linear(4, 4)
    simple.weight = nn.Parameter(distribute_tensor(simple.weight.detach(), line, [Shard(0)]))
    mixed = made_model()
    fully_shard(mixed.blocks[0], mesh=line)
    frozen = made_model().requires_grad_(False)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (model, "fully_shard", {}),
        (nn.parallel.DistributedDataParallel(model), "register_comm_hook", {}),
        (
            FullyShardedDataParallel(
                nn.Linear(4, 4), process_group=mesh.get_group("shard"), device_id=torch.device("cpu")
            ),
            "FSDP1",
            {},
        ),
        (simple, "SimpleFSDP", {}),
        (fully_shard(mixed, mesh=mesh), "different meshes", {}),
        (sharded(model, line), "cannot reduce-scatter", {"gradients": "powersgd"}),
        (sharded(frozen, mesh), "frozen", {}),
        (sharded(model, mesh), "weights=", {"weights": "cache"}),
        (sharded(model, mesh), "expected a codec", {"gradients": "int9"}),
        (sharded(model, mesh), "takes no codec", {"algorithm": "gradient_allreduce"}),
        (sharded(model, mesh), "optimizer", {"gradients": "decentralized"}),
        (sharded(model, mesh), "average", {"average": False}),
        (sharded(model, mesh), "nonsense", {"nonsense": 1}),
    ]
    for given, words, options in cases:
        with named(words), pytest.raises(ValueError, match=words):
            bagua.fsdp.compress(given, **options)
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(ValueError, match="compiled_autograd"):
        bagua.fsdp.compress(sharded(model, mesh))


@on_ranks(4)
def test_hosts_that_ask_for_different_codecs_get_an_error() -> None:
    ours = sharded(made_model(), mesh_of())
    with pytest.raises(ValueError, match="other options"):
        bagua.fsdp.compress(ours, "int8" if dist.get_rank() < 2 else "4bit")
    expected = pytest.raises(ValueError, match="rank 1 could not" if dist.get_rank() < 2 else "expected a codec")
    with expected if dist.get_rank() < 4 else nullcontext():
        bagua.fsdp.compress(ours, "int8" if dist.get_rank() < 2 else "no codec")


@on_ranks(4)
def test_gradients_reduced_after_the_backward_are_refused() -> None:
    ours = compressed(sharded(made_model(), mesh_of()))
    if not hasattr(ours, "set_manual_backward_finalization"):
        pytest.skip("torch before 2.15 has no manual finalization")
    ours.set_manual_backward_finalization(True)
    loss_of(ours, 0).backward()
    with pytest.raises(ValueError, match="set_manual_backward_finalization"):
        ours.finalize_backward()
