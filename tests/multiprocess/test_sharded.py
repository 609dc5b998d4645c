# SPDX-License-Identifier: Apache-2.0
"""bagua.fsdp.compress: what FSDP2 itself would have computed, within a codec's error."""

from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import randn
from hooked_models import same_everywhere
from ranks import on_new_ranks, on_ranks
from sharded_models import (
    MESHES,
    POLICIES,
    WIDTHS,
    accumulated_in_host,
    accumulated_in_whole,
    check_equal,
    compressed,
    error_of,
    in_full_precision,
    loss_of,
    made_model,
    mesh_of,
    plain_step,
    sharded,
    trained,
)
from torch import nn
from torch.distributed.fsdp import fully_shard


def accumulated_in_gradients(model: Any, step: int) -> None:
    """They are reduced every time, and added to those of before."""
    for part in range(2):
        loss_of(model, step, part).backward()


def all_at_once(model: Any, step: int) -> None:
    """Accumulate, with activation checkpoints, and clip: nothing may be missing in the norm of the whole."""
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        loss_of(model, step, part, is_reentrant=False).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def divided(model: Any, step: int, *, factor: float = 3.0, is_summed: bool = True) -> None:
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(is_summed)
    plain_step(model, step)


def divided_by_the_reduction(model: Any, step: int) -> None:
    """FSDP2 asks for a sum of gradients that are multiplied before: here by a power of two, so that none is rounded."""
    divided(model, step, factor=8.0, is_summed=False)


def skipping(model: Any, step: int) -> None:
    """One of the blocks has no gradients in every other step."""
    loss_of(model, step, skipped=step % 2).backward()


def checkpointed(model: Any, step: int) -> None:
    loss_of(model, step, is_reentrant=step % 2 == 1).backward()


STEPS = [accumulated_in_host, accumulated_in_gradients, divided, divided_by_the_reduction, skipping, checkpointed]


on_two_meshes = pytest.mark.parametrize("mesh_name", ["hybrid", "line"])


@on_two_meshes
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@on_ranks(4)
def test_what_is_exact_is_what_fsdp2_computes(mesh_name: str, step: Any) -> None:
    computes_as_fsdp2_does(mesh_name, step)


@on_new_ranks(4)  # as what DTensor remembers of a mesh outlives its groups
def test_accumulated_checkpointed_clipped_gradients_in_bfloat16_are_those_of_fsdp2() -> None:
    for mesh_name in ("hybrid", "line"):
        computes_as_fsdp2_does(mesh_name, all_at_once, **POLICIES["bfloat16"])


def failing_at_its_end(model: Any, step: int) -> None:
    """Fail in a first backward after FSDP2 has ended it, before others that wait for its end are called; try again."""

    def fail() -> None:
        raise KeyError("of the user's code")

    x = randn(6, WIDTHS[0], seed=step).requires_grad_()
    x.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(fail))
    with pytest.raises(KeyError):
        model(x).square().sum().backward()
    model.zero_grad()
    plain_step(model, step)


@on_two_meshes
@on_ranks(4)
def test_a_backward_ends_also_after_one_that_an_error_kept_from_it(mesh_name: str) -> None:
    mesh, model = mesh_of(mesh_name), made_model()
    expected = trained(sharded(model, mesh), step=failing_at_its_end)
    ours = sharded(model, mesh)
    handle = bagua.fsdp.compress(ours, "gradient_allreduce", weights="cache" if mesh.ndim == 1 else None)
    check_equal(trained(ours, step=failing_at_its_end), expected)
    assert handle.stats()["steps"] == 2 * 3


def computes_as_fsdp2_does(mesh_name: str, step: Any, **policy: Any) -> None:
    mesh, model = mesh_of(mesh_name), made_model()
    expected = trained(sharded(model, mesh, **policy), step=step)
    own = trained(in_full_precision(sharded(model, mesh, **policy), mesh), step=step)
    check_equal(own, expected)


@on_two_meshes
@pytest.mark.parametrize("name", ["reduced in bfloat16", "reduced in float16", "kept whole", "offloaded"])
@on_ranks(4)
def test_it_does_so_with_every_policy(mesh_name: str, name: str) -> None:
    mesh, model, policy = mesh_of(mesh_name), made_model(), POLICIES[name]
    bits = {"reduced in bfloat16": 2e-2, "reduced in float16": 2e-3}.get(name, 1e-5)
    expected = trained(sharded(model, mesh, **policy))
    own = trained(in_full_precision(sharded(model, mesh, **policy), mesh))
    check_equal(own, expected, rtol=bits, atol=bits)


CODED = [
    *(("hybrid", gradients) for gradients in ("int8", "4bit", "bytegrad", "powersgd")),
    *((mesh, gradients) for mesh in ("line", "line of hosts") for gradients in ("int8", "4bit")),
    ("line", "bytegrad"),
]


@pytest.mark.parametrize(("mesh_name", "gradients"), CODED)
@on_ranks(4)
def test_coded_gradients_are_near_and_the_same_on_all_hosts(mesh_name: str, gradients: str) -> None:
    mesh, model = mesh_of(mesh_name), made_model()
    options: dict[str, Any] = {"start_step": 0, "rank": 16} if gradients == "powersgd" else {}
    options |= {"exact": ()} if gradients in ("int8", "4bit") else {}
    ours = sharded(model, mesh)
    handle = bagua.fsdp.compress(ours, gradients, **options)
    # Weights stay, so that no step inherits the error of another.
    expected, own = trained(sharded(model, mesh), rate=0), trained(ours, rate=0)
    assert error_of(own, expected) < {"int8": 0.015, "bytegrad": 0.015, "4bit": 0.2, "powersgd": 0.5}[gradients]
    if mesh_name == "hybrid":
        assert same_everywhere(*own.gradients[-1].values(), group=mesh.get_group("replicate"))
    stats = handle.stats()
    assert stats["steps"] == stats["rounds"] == 3
    # Two blocks and the head: what is frozen is not reduced.
    assert stats["buckets"] == 9
    assert stats["wire_bytes_between_hosts"] < 0.6 * stats["logical_bytes"]
    # On two hosts of a line sums are made inside them; else there is but the agreement on each step.
    assert (stats["wire_bytes_in_host"] > 1000) == (mesh_name == "line")


class Wide(nn.Module):
    """Large enough for the bytes of headers to count for little."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2))
        self.frozen = nn.Linear(256, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.frozen(x)
        return result


# What of its gradients in float32 a rank sends to other hosts. On a line its part of the host's sum goes to one of two
# hosts, or three of four parts to other ones.
SENT = {"hybrid": 1.0, "line": 0.25, "line of hosts": 0.75}


@pytest.mark.parametrize("mesh_name", MESHES)
@on_ranks(4)
def test_between_hosts_go_the_bytes_of_the_codec_alone(mesh_name: str) -> None:
    mesh = mesh_of(mesh_name)
    # Padded to rows for every rank.
    rows = 2 if mesh_name == "hybrid" else 4
    whole = 4 * (2 * 256 * 256 + 256 * rows)
    for gradients, share in (("gradient_allreduce", 1.0), ("int8", 0.26), ("4bit", 0.14)):
        model = sharded(Wide(), mesh)
        unwatched = {} if gradients == "gradient_allreduce" else {"guard": None}
        handle = bagua.fsdp.compress(model, gradients, **unwatched)
        model(torch.randn(4, 256)).sum().backward()
        stats = handle.stats()
        assert stats["logical_bytes"] == (whole // 2 if mesh_name == "hybrid" else whole)
        sent = stats["wire_bytes_between_hosts"] / stats["logical_bytes"] / SENT[mesh_name]
        assert 0.9 * share < sent < 1.05 * share, gradients
        # On two hosts of a line sums are made inside them; else there is but the agreement on each step.
        assert (stats["wire_bytes_in_host"] > 1000) == (mesh_name == "line"), gradients


@on_two_meshes
@on_ranks(4)
def test_error_feedback_gives_back_what_it_has_kept(mesh_name: str) -> None:
    """The same gradients again and again: their sums differ by what is held back, and by nothing that grows."""
    mesh, model = mesh_of(mesh_name), made_model()
    steps = 16
    expected = trained(sharded(model, mesh), [0], rate=0)
    own = trained(compressed(sharded(model, mesh), "4bit", exact=(), residuals="float32"), [0] * steps, rate=0)
    for name, gradient in expected.gradients[0].items():
        total = torch.stack([step[name] for step in own.gradients]).sum(0)
        # A shard may have no element of a parameter.
        assert (total - steps * gradient).norm() <= 0.02 * steps * gradient.norm(), name


@on_two_meshes
@on_ranks(4)
def test_error_feedback_keeps_what_it_has_of_blocks_without_gradients(mesh_name: str) -> None:
    ours = sharded(made_model(), mesh_of(mesh_name))
    handle = bagua.fsdp.compress(ours, "4bit", exact=())
    trained(ours)
    before = handle.state_dict()["state"]
    loss_of(ours, 3, skipped=0).backward()
    after = handle.state_dict()["state"]
    names = [name for name, _ in ours.named_parameters()]
    for name, residual in before.items():
        # Part after part, where gradients travel in parts.
        parameter = names[int(name.split(".")[2]) % len(names)]
        is_kept = parameter.startswith("blocks.0") or name.endswith("pieces") or not residual.any()
        assert torch.equal(after[name], residual) == is_kept, name


@on_ranks(4)
def test_a_backward_inside_a_backward_is_no_step_of_its_own() -> None:
    ours = sharded(made_model(), mesh_of())
    handle = bagua.fsdp.compress(ours, "4bit", exact=())
    trained(ours, step=checkpointed)
    assert handle.stats()["steps"] == 3
    assert handle.stats()["buckets"] == 9
    trained(ours, step=accumulated_in_whole)
    assert handle.stats()["steps"] == 6
    trained(ours, step=accumulated_in_gradients)
    assert handle.stats()["steps"] == 12


@on_two_meshes
@on_ranks(4)
def test_fsdp2_reduces_by_itself_after_remove_and_another_algorithm_may_come(mesh_name: str) -> None:
    mesh, model = mesh_of(mesh_name), made_model()
    stock, ours = sharded(model, mesh), sharded(model, mesh)
    handle = bagua.fsdp.compress(ours, "1bit")
    with pytest.raises(RuntimeError, match="remove"):
        bagua.fsdp.compress(ours, "int8")
    handle.remove()
    before = handle.stats()["buckets"]
    check_equal(trained(ours), trained(stock), rtol=0, atol=0)
    assert handle.stats()["buckets"] == before
    again = bagua.fsdp.compress(ours, "gradient_allreduce")
    check_equal(trained(ours), trained(stock))
    assert again.stats()["steps"] == 3


@on_two_meshes
@on_ranks(4)
def test_modules_that_were_sharded_together_are_reduced_once_and_let_go(mesh_name: str) -> None:
    mesh = mesh_of(mesh_name)

    def together() -> Any:
        model: Any = made_model()
        fully_shard([model.blocks[1], model.head], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    stock, ours = together(), together()
    handle = bagua.fsdp.compress(ours, "gradient_allreduce")
    check_equal(trained(ours), trained(stock))
    handle.remove()
    check_equal(trained(ours), trained(stock))
    bagua.fsdp.compress(ours, "int8").remove()


@on_two_meshes
@on_ranks(4)
def test_a_step_with_a_lost_gradient_leaves_error_feedback_as_it_was(mesh_name: str) -> None:
    ours = sharded(made_model(), mesh_of(mesh_name))
    handle = bagua.fsdp.compress(ours, "4bit")
    trained(ours)
    before = handle.state_dict()["state"]
    spoilt = torch.ones(WIDTHS[-1]).index_fill_(0, torch.tensor([0]), float("nan") if dist.get_rank() == 1 else 1.0)

    # Only the rank that has the first element of the sum sees it.
    def spoil(head: nn.Module, _: object) -> None:
        head.bias.register_hook(lambda gradient: gradient * spoilt)  # type: ignore[union-attr,operator]

    ours.head.register_forward_pre_hook(spoil)
    loss_of(ours, 3).backward()
    after = handle.state_dict()["state"]
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    handle.rescale(2)
    assert all(
        torch.equal(handle.state_dict()["state"][name], 2 * value)
        for name, value in before.items()
        if value.is_floating_point() and "pieces" not in name
    )
