# SPDX-License-Identifier: Apache-2.0
"""Sharded models in torch's distributed checkpoints, as docs/sharded.md writes and loads them."""

import io
import shutil
import tempfile
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from sharded_models import loss_of, made_model, mesh_of, on_hosts, sharded, shards_of
from torch import Tensor


@pytest.mark.parametrize("mesh_name", ["hybrid", "line"])
@on_ranks(4)
def test_a_run_continues_a_distributed_checkpoint_with_the_same_bits(mesh_name: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh, name = mesh_of(mesh_name), f"bagua of rank {dist.get_rank()}"

    def begun() -> tuple[Any, bagua.Handle, torch.optim.Optimizer]:
        model = sharded(made_model(), mesh)
        handle = bagua.fsdp.compress(model, "4bit", weights="cache" if mesh.ndim == 1 else None)
        return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def after(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
        for step in steps:
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return shards_of(model)

    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    model, handle, optimizer = begun()
    after(model, optimizer, range(3))
    weights, of_optimizer = get_state_dict(model, optimizer)
    torch.save(handle.state_dict(), packed := io.BytesIO())
    dcp.save({"model": weights, "optimizer": of_optimizer, name: packed.getvalue()}, checkpoint_id=folder[0])
    expected = after(model, optimizer, range(3, 6))

    model, handle, optimizer = begun()
    weights, of_optimizer = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": of_optimizer, name: b""}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    handle.load_state_dict(torch.load(io.BytesIO(loaded[name])))
    own = after(model, optimizer, range(3, 6))
    assert all(torch.equal(own[one], tensor) for one, tensor in expected.items())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


@pytest.mark.parametrize("kind", ["plain", "momentum", "rate in a tensor"])
@on_ranks(4)
def test_the_step_by_which_torch_makes_the_state_of_an_optimizer_is_none_of_a_round(kind: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    mesh = mesh_of()
    trainings = []
    for is_asked in (False, True):
        model = sharded(made_model(), mesh)
        rate = torch.tensor(1e-4) if kind == "rate in a tensor" else 1e-4
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if kind == "momentum" else 0.0)
        with on_hosts("hybrid"):
            handle = bagua.fsdp.compress(model, "diloco", optimizer=optimizer, sync_every=3, fragments=1, delay=0)
        if is_asked:
            get_state_dict(model, optimizer)
        with torch.no_grad():
            # As dcp.load() writes them.
            for parameter in model.parameters():
                parameter.mul_(0.5)
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_asked:
                get_state_dict(model, optimizer)
        trainings.append((shards_of(model), handle.stats()["rounds"]))
    (expected, rounds), (own, others) = trainings
    assert rounds == others == 2
    assert all(torch.equal(own[name], one) for name, one in expected.items())
