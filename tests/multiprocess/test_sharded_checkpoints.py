# SPDX-License-Identifier: Apache-2.0
"""Sharded models in torch's distributed checkpoints, as docs/sharded.md writes and loads them."""

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks, run_ranks
from sharded_models import Block, loss_of, made_model, mesh_of, on_hosts, outcome, sharded, shards_of, trained
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

Training = tuple[Any, bagua.Handle, torch.optim.Optimizer]


def begun(mesh: DeviceMesh, gradients: str, coded: str | None) -> Training:
    model = sharded(made_model(), mesh)
    handle = bagua.fsdp.compress(model, gradients, weights=coded)
    return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-3)


def after(training: Training, steps: range, skips: bool = False) -> dict[str, Tensor]:
    """Train, and return the shards; where it skips, one of the blocks has no gradients in every other step."""
    model, _, optimizer = training
    for step in steps:
        loss_of(model, step, skipped=step % 2 if skips else -1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shards_of(model)


def save(folder: str, training: Training) -> None:
    model, handle, optimizer = training
    weights, of_optimizer = get_state_dict(model, optimizer)
    torch.save(handle.state_dict(), packed := io.BytesIO())
    name = f"bagua of rank {dist.get_rank()}"
    dcp.save({"model": weights, "optimizer": of_optimizer, name: packed.getvalue()}, checkpoint_id=folder)


def load(folder: str, training: Training, rank: int) -> dict[str, Any]:
    """Load model and optimizer; returns what the handle of a rank had saved."""
    model, _, optimizer = training
    weights, of_optimizer = get_state_dict(model, optimizer)
    name = f"bagua of rank {rank}"
    loaded: dict[str, Any] = {"model": weights, "optimizer": of_optimizer, name: b""}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    state: dict[str, Any] = torch.load(io.BytesIO(loaded[name]))
    return state


# Between the last step and the checkpoint an evaluation has gathered what the step has made of the weights, or not.
RUNS = [("hybrid", None, False), ("line", "4bit", False), ("line", "int8", True)]


@pytest.mark.parametrize(("mesh_name", "coded", "is_evaluated"), RUNS)
@on_ranks(4)
def test_a_run_continues_a_distributed_checkpoint_with_the_same_bits(
    mesh_name: str, coded: str | None, is_evaluated: bool
) -> None:
    mesh = mesh_of(mesh_name)
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    training = begun(mesh, "4bit", coded)
    after(training, range(3))
    if is_evaluated:
        with torch.no_grad():
            loss_of(training[0], 9)
    save(folder[0], training)
    expected = after(training, range(3, 6), skips=True)

    _, handle, _ = training = begun(mesh, "4bit", coded)
    saved = load(folder[0], training, dist.get_rank())
    handle.load_state_dict(saved)
    assert handle.state_dict()["step"] == 3
    own = after(training, range(3, 6), skips=True)
    assert all(torch.equal(own[one], tensor) for one, tensor in expected.items())
    with pytest.raises(ValueError, match="rank"):
        handle.load_state_dict({**saved, "rank": (dist.get_rank() + 1) % 4})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def full_weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


CODED = [("int8", "cache"), ("4bit", "int8")]


def written(folder: str) -> list[dict[str, Tensor]]:
    weights = []
    for gradients, coded in CODED:
        training = begun(mesh_of("line"), gradients, coded)
        after(training, range(3))
        save(folder + coded, training)
        weights.append(full_weights(training[0]))
    return weights


def continued(folder: str, written: list[dict[str, Tensor]]) -> None:
    for (gradients, coded), weights in zip(CODED, written, strict=True):
        model, handle, _ = training = begun(mesh_of("line"), gradients, coded)
        saved = load(folder + coded, training, rank=0)
        assert bool(saved["state"]) == (gradients == "4bit")
        if saved["state"]:
            with pytest.raises(ValueError, match="state of other shards"):
                handle.load_state_dict(saved)
        handle.load_state_dict({**saved, "state": {}})
        assert all(torch.equal(one, weights[name]) for name, one in full_weights(model).items())
        expected = made_model()
        expected.load_state_dict(weights)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, 3), loss_of(expected, 3))
        after(training, range(3, 5))
        assert handle.state_dict()["step"] == 5
        assert not any(
            torch.equal(one, weights[name]) for name, one in full_weights(model).items() if "frozen" not in name
        )


@pytest.mark.parametrize(("former", "ranks"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.long)])
def test_more_or_fewer_ranks_go_on_with_all_weights(tmp_path: Path, former: int, ranks: int) -> None:
    # New ones, as what DTensor remembers of a mesh outlives its groups.
    weights = run_ranks(former, written, f"{tmp_path}/")[0]
    run_ranks(ranks, continued, f"{tmp_path}/", weights)


@on_ranks(4)
def test_other_weights_than_those_of_the_checkpoint_are_gathered_in_full() -> None:
    mesh = mesh_of("line")
    model, other, whole = (sharded(made_model(), mesh) for _ in range(3))
    handle = bagua.fsdp.compress(model, "gradient_allreduce", weights="1bit")
    trained(model)
    saved = handle.state_dict()
    resumed = bagua.fsdp.compress(other, "gradient_allreduce", weights="1bit")
    for is_changed_after in (False, True):
        if is_changed_after:
            resumed.load_state_dict(saved)
        with torch.no_grad():
            for one in (other, whole):
                one.head.weight.mul_(2)
        if not is_changed_after:
            resumed.load_state_dict(saved)
        torch.testing.assert_close(outcome(other), outcome(whole), rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_weights_that_differ_from_the_checkpoint_on_one_rank_are_gathered_in_full_by_all() -> None:
    torch.manual_seed(5)
    model, other, whole = (fully_shard(Block(8, 16), mesh=mesh_of("line")) for _ in range(3))
    handle = bagua.fsdp.compress(model, "gradient_allreduce", weights="1bit")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = handle.state_dict()
    resumed = bagua.fsdp.compress(other, "gradient_allreduce", weights="1bit")
    with torch.no_grad():
        for one in (other, whole):
            for parameter, its in zip(one.parameters(), model.parameters(), strict=True):
                parameter.copy_(its)
            # It has one row, on one rank.
            one.scale.mul_(2)
    resumed.load_state_dict(saved)
    x = torch.randn(4, 8)
    torch.testing.assert_close(other(x), whole(x), rtol=1e-5, atol=1e-6)


def mesh_for(name: str) -> DeviceMesh:
    """One of `mesh_of`, or of the same ranks with other shards."""
    if name == "one host":
        return init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    if name != "pair":
        return mesh_of(name)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return DeviceMesh.from_group(groups[dist.get_rank() // 2], "cpu", mesh_dim_names=("shard",))


@pytest.mark.parametrize("meshes", [("line", "pair"), ("hybrid", "line"), ("hybrid", "one host")])
@on_ranks(4)
def test_the_state_of_other_shards_is_refused_with_what_to_do(meshes: tuple[str, str]) -> None:
    """Some of it would fit in length."""
    for name, options in (("4bit", {"residuals": "float32", "hierarchical": False}), ("diloco", {"sync_every": 2})):
        trainings = []
        for mesh in map(mesh_for, meshes):
            model = sharded(made_model(), mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            if name != "diloco" or mesh.ndim == 2:
                trainings.append((model, optimizer, bagua.fsdp.compress(model, name, optimizer=optimizer, **options)))
        if len(trainings) < 2:
            continue
        (model, optimizer, handle), (_, _, other) = trainings
        loss_of(model, 0).backward()
        optimizer.step()
        saved, remedy = handle.state_dict(), r"synchronize\(\)" if name == "diloco" else r"\{\*\*checkpoint"
        with pytest.raises(ValueError, match=rf"state of other shards.*{remedy}"):
            other.load_state_dict(saved)
        if name == "4bit":
            other.load_state_dict({**saved, "state": {}})
            assert other.state_dict()["step"] == 1
            trained(trainings[1][0])


@on_ranks(4)
def test_the_step_by_which_torch_makes_the_state_of_an_optimizer_is_none_of_a_round() -> None:
    mesh = mesh_of()
    trainings = []
    for is_asked in (False, True):
        model = sharded(made_model(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
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
