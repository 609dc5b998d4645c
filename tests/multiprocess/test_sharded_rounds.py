# SPDX-License-Identifier: Apache-2.0
"""local_sgd and diloco of a model that is sharded inside hosts: what DDP computes with hosts as participants."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import emulated_hosts, logged, same_everywhere
from ranks import on_ranks
from reference import named
from sharded_models import (
    MESHES,
    POLICIES,
    accumulated_in_host,
    accumulated_in_whole,
    local,
    loss_of,
    made_model,
    mesh_of,
    on_hosts,
    plain_step,
    sharded,
    shards_of,
    trained,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP

Step = Callable[[Any, torch.optim.Optimizer, int], None]
Weights = dict[str, Tensor]


def stepped(backward: Callable[[Any, int], None], model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


plain = partial(stepped, plain_step)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def many_at_once(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def followed(
    model: Any, handle: bagua.Handle, optimizer: torch.optim.Optimizer, steps: Sequence[int], step: Step
) -> list[Weights]:
    weights = []
    for number in steps:
        step(model, optimizer, number)
        weights.append(shards_of(model))
    handle.synchronize()
    return [*weights, shards_of(model)]


def under_ddp(
    algorithm: str, steps: Sequence[int], step: Step, make: Any = momentum_sgd, **options: Any
) -> list[Weights]:
    with emulated_hosts("0011") as group:
        ddp = DDP(made_model(), process_group=group)
        optimizer = make(ddp)
        handle = bagua.register_comm_hook(ddp, algorithm, optimizer, hierarchical=True, **options)
        weights = followed(ddp, handle, optimizer, steps, step)
        handle.remove()
    return [{name.removeprefix("module."): one for name, one in own.items()} for own in weights]


def in_rounds(
    gradients: str = "diloco", make: Any = momentum_sgd, **options: Any
) -> tuple[Any, bagua.Handle, torch.optim.Optimizer]:
    model = sharded(made_model(), mesh_of(), **options.pop("policy", {}))
    optimizer = make(model)
    with on_hosts("hybrid"):
        return model, bagua.fsdp.compress(model, gradients, optimizer=optimizer, **options), optimizer


def resumed_from(
    model: Any, handle: bagua.Handle, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[Any, bagua.Handle, torch.optim.Optimizer]:
    """A training with the states of another."""
    other = in_rounds(**options)
    for own, one in zip(other, (model, handle, optimizer), strict=True):
        own.load_state_dict(copy.deepcopy(one.state_dict()))
    return other


def check_same(own: Sequence[Weights], expected: Sequence[Weights]) -> None:
    for number, (one, other) in enumerate(zip(own, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            error = (tensor - other[name]).abs().max().item() if tensor.numel() else 0.0
            assert tensor.shape == other[name].shape
            assert error < 1e-6, f"{name} is off by {error:.2g} after step {number}"


# So many it takes to measure, to agree among the ranks of the same shards, and among those of a host.
STEPS_OF_CHOICE = 18

PLANS: list[tuple[str, dict[str, Any]]] = [
    ("local_sgd", {"sync_every": 3}),
    ("diloco", {"sync_every": 3, "fragments": 1, "delay": 0}),
    ("diloco", {"sync_every": 4, "fragments": 2, "delay": 1, "mixing": 0.25}),
]


@pytest.mark.parametrize(("algorithm", "options"), PLANS, ids=str)
@on_ranks(4)
def test_rounds_over_shards_are_those_of_ddp_between_hosts(algorithm: str, options: dict[str, Any]) -> None:
    make = adam if algorithm == "local_sgd" else momentum_sgd
    model, handle, optimizer = in_rounds(algorithm, make, **options)
    start = shards_of(model)
    own = followed(model, handle, optimizer, range(9), plain)
    check_same(own, under_ddp(algorithm, range(9), plain, make, **options))
    assert any((own[-1][name] - one).abs().max() > 1e-4 for name, one in start.items() if one.numel())
    assert handle.stats()["steps"] == 9
    assert same_everywhere(own[-1]["head.weight"], group=mesh_of_hosts())


def mesh_of_hosts() -> dist.ProcessGroup:
    """The ranks that hold the same shards."""
    groups = [dist.new_group([column, column + 2]) for column in range(2)]
    group = groups[dist.get_rank() % 2]
    assert group is not None
    return group


@on_ranks(4)
def test_one_schedule_is_chosen_for_all_shards_and_kept_by_checkpoints() -> None:
    model, handle, optimizer = in_rounds()
    for number in range(STEPS_OF_CHOICE - 1):
        plain(model, optimizer, number)
    assert handle.stats()["chosen"] == {}
    plain(model, optimizer, 0)
    chosen = handle.stats()["chosen"]
    schedules: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(schedules, chosen)
    assert all(schedule == chosen for schedule in schedules)
    assert chosen["sync_every"] >= 30
    other, resumed, another = resumed_from(model, handle, optimizer)
    assert resumed.stats()["chosen"] == chosen
    for number in range(chosen["sync_every"]):
        plain(model, optimizer, number)
        plain(other, another, number)
    # Each fragment once.
    assert handle.stats()["rounds"] == chosen["fragments"]
    expected = shards_of(model)
    assert all(torch.equal(one, expected[name]) for name, one in shards_of(other).items())
    handle.synchronize()
    assert same_everywhere(shards_of(model)["head.weight"], group=mesh_of_hosts())


@on_ranks(4)
def test_an_overflow_in_one_shard_is_a_skipped_step_of_its_host() -> None:
    model, handle, optimizer = in_rounds("local_sgd", sync_every=4)
    plain(model, optimizer, 0)
    loss_of(model, 1).backward()
    if dist.get_rank() == 0:
        weight = next(p for p in model.parameters() if p.grad is not None and local(p.grad).numel())
        weight.grad = weight.grad * torch.inf
    if dist.get_rank() > 1:
        optimizer.step()
    handle.synchronize()
    assert handle.stats()["steps"] == 2
    assert same_everywhere(shards_of(model)["head.weight"], group=mesh_of_hosts())


@on_ranks(4)
def test_coded_rounds_send_few_bytes_and_only_when_a_fragment_is_exchanged() -> None:
    model, handle, optimizer = in_rounds("int8", algorithm="diloco", sync_every=3, fragments=1, delay=0)
    sent = []
    for number in range(9):
        plain(model, optimizer, number)
        sent.append(handle.stats()["wire_bytes_between_hosts"])
    handle.synchronize()
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad) / 2
    steps = [after - before for before, after in pairwise(sent)]
    # Nothing but the exchanges after steps 3, 6 and 9.
    assert [number for number, bytes_sent in enumerate(steps, 2) if bytes_sent] == [3, 6, 9]
    # Half of the shard goes to the other host, and the mean of the other half.
    assert elements < steps[1] < 1.1 * elements


def skipped_by_a_host(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Gradients are dropped, or set to zero, where one host has taken no step."""
    loss_of(model, number).backward()
    if number not in (2, 5) or dist.get_rank() // 2 != number % 2:
        optimizer.step()
    optimizer.zero_grad(set_to_none=number == 2)


def two_forwards_first(model: Any, number: int) -> None:
    losses = [loss_of(model, number, part) for part in range(2)]
    if isinstance(model, DDP):
        sum(losses).backward()
    else:
        for loss in losses:
            loss.backward()


def backward_twice(model: Any, number: int) -> None:
    loss = loss_of(model, number)
    if isinstance(model, DDP):
        (2 * loss).backward()
    else:
        loss.backward(retain_graph=True)
        loss.backward()


BACKWARDS = [accumulated_in_whole, accumulated_in_host, two_forwards_first, backward_twice]
TRAININGS = [
    *((partial(stepped, backward), momentum_sgd) for backward in BACKWARDS),
    *((skipped_by_a_host, make) for make in (momentum_sgd, many_at_once)),
]


@pytest.mark.parametrize(("step", "make"), TRAININGS)
@on_ranks(4)
def test_steps_count_as_the_optimizer_takes_them_or_skips_them(step: Step, make: Any) -> None:
    options: dict[str, Any] = {"sync_every": 3, "fragments": 1, "delay": 0}
    own = followed(*in_rounds(make=make, **options), range(8), step)
    expected = under_ddp("diloco", range(8), step, make, **options)
    # A host that has skipped the step of an exchange notices in its next forward.
    exact = [i for i in range(8) if step is not skipped_by_a_host or i not in (2, 5)]
    check_same([own[i] for i in [*exact, 8]], [expected[i] for i in [*exact, 8]])


@pytest.mark.parametrize("name", ["bfloat16", "reduced in float16", "kept whole", "offloaded"])
@on_ranks(4)
def test_a_host_by_itself_computes_what_fsdp2_does_with_every_policy(name: str) -> None:
    policy = POLICIES[name]
    model, handle, _ = in_rounds(sync_every=100, policy=policy)
    own = trained(model)
    alone = trained(sharded(made_model(), mesh_of()["shard"], **policy))
    for step, others in zip(own.gradients, alone.gradients, strict=True):
        for gradient, other in zip(step.values(), others.values(), strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-3 if name == "reduced in float16" else 1e-6, atol=1e-6)
    assert handle.stats()["steps"] == 3


@on_ranks(4)
def test_a_run_that_was_resumed_within_a_round_goes_on_with_the_same_bits() -> None:
    options = {"sync_every": 4, "fragments": 2, "delay": 1}
    model, handle, optimizer = in_rounds(**options)
    for number in range(5):
        plain(model, optimizer, number)
    one = followed(*resumed_from(model, handle, optimizer, **options), range(5, 11), plain)
    for own, expected in zip(one, followed(model, handle, optimizer, range(5, 11), plain), strict=True):
        assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())


@on_ranks(4)
def test_the_weights_of_a_test_are_those_of_the_shards_after_synchronize() -> None:
    model, handle, optimizer = in_rounds(sync_every=100)
    for number in range(2):
        plain(model, optimizer, number)
    inputs = torch.ones(1, 67)
    with torch.no_grad():
        # FSDP2 keeps the outermost weights whole after it.
        model(inputs)
        handle.synchronize()
        after = model(inputs)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        assert torch.equal(after, model(inputs))


@on_ranks(4)
def test_after_remove_hosts_are_equal_and_fsdp2_reduces_between_them() -> None:
    model, handle, optimizer = in_rounds(make=adam, sync_every=100)
    for number in range(3):
        plain(model, optimizer, number)
    loss_of(model, 3).backward()
    hosts = mesh_of_hosts()
    handle.remove()
    optimizer.step()
    plain_step(model, 4)
    optimizer.step()
    gradients = (local(p.grad) for p in model.parameters() if p.grad is not None)
    assert same_everywhere(*shards_of(model).values(), *gradients, group=hosts)
    bagua.fsdp.compress(model, "local_sgd", optimizer=optimizer)


@pytest.mark.parametrize("mesh_name", MESHES)
@on_ranks(4)
def test_what_cannot_be_trained_in_rounds_is_refused_with_its_name(mesh_name: str) -> None:
    model = sharded(made_model(), mesh_of(mesh_name))
    optimizer = momentum_sgd(model)
    if mesh_name != "hybrid":
        with pytest.raises(ValueError, match="mesh of two dimensions"):
            bagua.fsdp.compress(model, "local_sgd", optimizer=optimizer)
        return
    of_another = momentum_sgd(sharded(made_model(), mesh_of(mesh_name)))
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("local_sgd", "pass it as optimizer=", {}),
        ("local_sgd", "does not hold 12", {"optimizer": of_another}),
        ("async", "fully_shard keeps in shards", {"optimizer": optimizer}),
    ]
    for algorithm, words, options in cases:
        with named(words), pytest.raises(ValueError, match=words):
            bagua.fsdp.compress(model, algorithm, **options)
    handle = bagua.fsdp.compress(model, "local_sgd", optimizer=optimizer)
    with pytest.raises(RuntimeError, match="differ"):
        handle.of_all_ranks()
    model.eval()
    with pytest.raises(RuntimeError, match="has not seen the forward"):
        loss_of(model, 0).backward()
    model.train()
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="assign=True"):
        loss_of(model, 0)


@on_ranks(4)
def test_a_mesh_whose_replicas_are_inside_hosts_is_warned_of() -> None:
    ranks = torch.arange(4).view(2, 2)
    for layout, has_warning in ((ranks, False), (ranks.T.contiguous(), True)):
        with on_hosts("hybrid"), logged() as text:
            mesh = DeviceMesh("cpu", layout, mesh_dim_names=("replicate", "shard"))
            model = sharded(made_model(), mesh)
            bagua.fsdp.compress(model, "local_sgd", optimizer=momentum_sgd(model), sync_every=2)
        is_said = "the first dimension of the mesh is for hosts" in text.getvalue()
        assert is_said == (has_warning and dist.get_rank() == 0)
