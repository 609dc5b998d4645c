# SPDX-License-Identifier: Apache-2.0
"""Fused steps between plain ones, with gradients that come and go, and with what else takes part in training."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from bagua import QAdamOptimizer
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse.optimizer import fuse_step, is_fused_optimizer
from fused_training import (
    DEVICES,
    assert_same,
    assert_same_training,
    backward,
    fused,
    parameters_of,
    take_step,
    train,
    two_groups,
)
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

CONFIGS: list[Any] = [
    partial(optim.SGD, lr=0.05, momentum=0.9),
    partial(optim.SGD, lr=0.05),
    partial(optim.Adam, weight_decay=0.1, amsgrad=True),
    partial(optim.AdamW, foreach=True),
    partial(optim.ASGD, t0=3),
    partial(optim.NAdam, weight_decay=0.1),
    partial(optim.Adagrad, lr_decay=0.1),
    optim.Rprop,
    partial(QAdamOptimizer, warmup_steps=6, weight_decay=0.1),
]


def _name(config: Any) -> str:
    return getattr(config, "func", config).__name__


in_each_way = pytest.mark.parametrize("config", CONFIGS, ids=_name)
in_both_modes = pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])

MIXTURES: dict[str, Callable[[int], bool]] = {
    "alternating": lambda step: step % 2 == 0,
    "plain-first": lambda step: step >= 5,
    "fused-first": lambda step: step < 5,
    "now-and-then": lambda step: step % 7 in (1, 2, 5),
}


@in_both_modes
@pytest.mark.parametrize("mixture", MIXTURES)
@in_each_way
def test_plain_and_fused_steps_can_be_mixed(config: Any, mixture: str, set_to_none: bool) -> None:
    fusing = MIXTURES[mixture]
    optimizer = assert_same_training(config, set_to_none=set_to_none, fusing=fusing)
    assert optimizer._bagua_fused_count == 2 * sum(map(fusing, range(24)))


ABSENCES: dict[str, Callable[[int], Collection[int]]] = {
    "one-now-and-then": lambda step: {step % 7} if step % 3 else (),
    "the-middle-one-first": lambda step: {2} if step < 6 else (),
    "most-of-them": lambda step: {0, 2, 3, 5, 6} if step % 4 == 1 else (),
    "all-of-them": lambda step: range(7) if step == 9 else (),
    "one-for-ever": lambda step: {1},
}


def _fused_steps(absence: Callable[[int], Collection[int]], *, set_to_none: bool, has_state: bool) -> int:
    """In how many steps, over both groups, two neighbours have gradients and, if it matters, equal numbers of steps."""
    steps = [0] * 7
    count = 0
    for step in range(24):
        kept = () if set_to_none else {i for i in range(7) if steps[i] > 0}
        active = ({*range(7)} - {*absence(step)}) | {*kept}
        pairs = [{i, i + 1} <= active and (not has_state or steps[i] == steps[i + 1]) for i in range(6)]
        count += any(pairs[:3]) + any(pairs[4:])
        steps = [number + (i in active) for i, number in enumerate(steps)]
    return count


@in_both_modes
@pytest.mark.parametrize("absence", ABSENCES)
@in_each_way
def test_parameters_without_a_gradient_rest(config: Any, absence: str, set_to_none: bool) -> None:
    optimizer = assert_same_training(config, set_to_none=set_to_none, without=ABSENCES[absence])
    # The state of SGD is a momentum, if any; it has no number of steps, but there is none before the first one.
    assert optimizer._bagua_fused_count >= _fused_steps(ABSENCES[absence], set_to_none=set_to_none, has_state=True)
    if config is CONFIGS[1]:
        expected = _fused_steps(ABSENCES[absence], set_to_none=set_to_none, has_state=False)
        assert optimizer._bagua_fused_count == expected


@in_each_way
@pytest.mark.parametrize("device", DEVICES)
def test_numbers_of_steps_that_agree_again_are_fused_again(device: str, config: Any) -> None:
    # Parameter 1 misses step 3, its neighbours steps 4 and 5 of plain ones: then 1 is ahead; then behind; then level.
    absences = {3: {1}, 5: {0, 2, 3, 4, 5, 6}}
    optimizer = assert_same_training(
        config,
        make=lambda: parameters_of(device=device),
        without=lambda step: absences.get(step, ()),
        fusing=lambda step: step != 5,
    )
    assert optimizer._bagua_fused_count == 23 * 2


@in_both_modes
@in_each_way
def test_frozen_parameters_join_when_they_are_trained(config: Any, set_to_none: bool) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = parameters_of()
        for p in parameters[:3]:
            p.requires_grad = False
        optimizer: Any = kind(two_groups(parameters, lr=0.02))
        train(optimizer, parameters, range(8), set_to_none=set_to_none)
        for p in parameters[:3]:
            p.requires_grad = True
        train(optimizer, parameters, range(8, 24), set_to_none=set_to_none)
        results.append((parameters, optimizer))
    assert_same(*([p.detach() for p in parameters] for parameters, _ in results))
    assert_same(*(optimizer.state_dict() for _, optimizer in results))
    # In the first group only one parameter and a half are left at first.
    assert results[1][1]._bagua_fused_count >= 8 + 2 * 16


@in_each_way
def test_a_parameter_group_may_be_added(config: Any) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = parameters_of()
        optimizer: Any = kind(parameters[:4])
        train(optimizer, parameters, range(8))
        optimizer.add_param_group({"params": parameters[4:], "lr": 0.3})
        train(optimizer, parameters, range(8, 24))
        results.append((parameters, optimizer))
    assert_same(*([p.detach() for p in parameters] for parameters, _ in results))
    assert_same(*(optimizer.state_dict() for _, optimizer in results))
    assert results[1][1]._bagua_fused_count == 8 + 2 * 16


@in_both_modes
@pytest.mark.parametrize("second", ["plain", "fused", "same"])
@pytest.mark.parametrize("first", ["plain", "fused"])
@in_each_way
def test_checkpoints_go_from_either_kind_to_either(
    config: Any, first: str, second: str, set_to_none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"plain": config, "fused": fused(config)}
    expected = parameters_of()
    reference = config(two_groups(expected, lr=0.02))
    train(reference, expected, range(20), set_to_none=set_to_none)

    parameters = parameters_of()
    optimizer = kinds[first](two_groups(parameters, lr=0.02))
    train(optimizer, parameters, range(10), set_to_none=set_to_none)
    weights = [p.detach().clone() for p in parameters]
    checkpoint = pickle.loads(pickle.dumps(optimizer.state_dict()))
    if second == "same":
        # Back to where it was, from somewhere else.
        train(optimizer, parameters, range(50, 55), set_to_none=set_to_none)
    else:
        optimizer = kinds[second](two_groups(parameters, lr=0.02))
    with torch.no_grad():
        for p, weight in zip(parameters, weights, strict=True):
            p.copy_(weight)
    optimizer.load_state_dict(checkpoint)
    train(optimizer, parameters, range(10, 20), set_to_none=set_to_none)

    assert_same([p.detach() for p in parameters], [p.detach() for p in expected])
    assert_same(optimizer.state_dict(), reference.state_dict())
    if is_fused_optimizer(optimizer):
        assert optimizer._bagua_fused_count == {"same": 2 * 25, "fused": 2 * 10}[second]
    assert not caplog.records


def test_a_checkpoint_of_another_type_of_numbers_is_fused_too() -> None:
    parameters = parameters_of()
    optimizer = fused(partial(optim.Adam, lr=0.1))(parameters)
    train(optimizer, parameters, range(3))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for state in checkpoint["state"].values():
        state["step"] = state["step"].double()
    optimizer.load_state_dict(checkpoint)
    train(optimizer, parameters, range(3, 6))
    assert optimizer._bagua_fused_count == 6  # type: ignore[attr-defined]
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float64}


def _schedules(optimizer: Any) -> list[Any]:
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    return [schedule, LambdaLR(optimizer, lambda step: 0.9**step)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("replacing", ["never", "before", "after"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]], ids=_name)
def test_learning_rate_schedules_act_and_see_the_steps(config: Any, replacing: str) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = parameters_of()
        optimizer: Any = kind(two_groups(parameters))
        is_fused = is_fused_optimizer(optimizer)
        if is_fused and replacing == "before":
            optimizer.step = optimizer.fuse_step
        schedules = _schedules(optimizer)
        if is_fused and replacing == "after":
            optimizer.step = optimizer.fuse_step
        for step in range(24):
            optimizer.zero_grad()
            backward(parameters, step)
            take_step(optimizer, fusing=replacing == "never")
            for schedule in schedules:
                schedule.step()
        results.append((parameters, optimizer))
    assert_same(*([p.detach() for p in parameters] for parameters, _ in results))
    assert_same(*(optimizer.state_dict() for _, optimizer in results))
    assert results[1][1]._bagua_fused_count == 48


@in_both_modes
@pytest.mark.parametrize("by_hand", [True, False], ids=["fuse_step", "scaler.step"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]], ids=_name)
def test_a_gradient_scaler_skips_steps_with_infinite_gradients(config: Any, by_hand: bool, set_to_none: bool) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = parameters_of()
        optimizer: Any = kind(two_groups(parameters))
        is_fused = is_fused_optimizer(optimizer)
        if is_fused and not by_hand:
            optimizer.step = optimizer.fuse_step
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        for step in range(24):
            optimizer.zero_grad(set_to_none=set_to_none)
            scale = scaler.get_scale() if step % 5 != 3 else float("inf")
            scaler.scale(torch.ones(()))
            backward(parameters, step)
            for p in parameters:
                assert p.grad is not None
                p.grad.mul_(scale)
            scaler.unscale_(optimizer)
            if is_fused and by_hand:
                # What scaler.step() does for a plain step.
                has_inf = any(not p.grad.isfinite().all() for p in parameters if p.grad is not None)
                if not has_inf:
                    optimizer.fuse_step()
            else:
                scaler.step(optimizer)
            scaler.update()
        assert all(p.isfinite().all() for p in parameters)
        results.append((parameters, optimizer))
    assert_same(*([p.detach() for p in parameters] for parameters, _ in results))
    assert_same(*(optimizer.state_dict() for _, optimizer in results))
    # Of 24 steps, 3, 8, 13, 18 and 23 are skipped.
    assert results[1][1]._bagua_fused_count == 19 * 2


def test_qadam_keeps_refusing_a_gradient_scaler() -> None:
    parameters = parameters_of()
    optimizer = fuse_optimizer(QAdamOptimizer(parameters))
    optimizer.step = optimizer.fuse_step
    backward(parameters, 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    weights = [p.detach().clone() for p in parameters]
    with pytest.raises(RuntimeError, match="cannot be used with a GradScaler"):
        scaler.step(optimizer)
    assert_same([p.detach() for p in parameters], weights)
    assert optimizer.param_groups[0]["params"] == parameters


@pytest.mark.parametrize("handed_out", [range(7), (0, 1, 4)], ids=["all", "some"])
def test_qadam_takes_over_the_momenta_of_an_algorithm(handed_out: Collection[int]) -> None:
    results = []
    config = partial(QAdamOptimizer, lr=0.1, warmup_steps=3)
    for kind in (config, fused(config)):
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        for step in range(12):
            optimizer.zero_grad()
            momenta = optimizer.momenta([parameters[i] for i in handed_out])
            starts = [(start.clone(), beta) for start, beta in momenta]
            backward(parameters, step)
            for i, (start, beta) in zip(handed_out, starts, strict=bool(starts)):
                grad = parameters[i].grad
                assert grad is not None
                parameters[i].grad = beta * start + (1 - beta) * grad
            take_step(optimizer)
        results.append((parameters, optimizer))
    assert_same(*([p.detach() for p in parameters] for parameters, _ in results))
    assert_same(*(optimizer.state_dict() for _, optimizer in results))
    assert results[1][1]._bagua_fused_count == 12
    assert not results[1][1]._handed_out


def test_step_hooks_run_once_with_the_optimizer_itself() -> None:
    calls: list[Any] = []
    parameters = parameters_of()
    optimizer = fuse_optimizer(optim.AdamW(parameters))
    optimizer.register_step_pre_hook(lambda own, args, kwargs: calls.append(("before", own, args, kwargs)))
    optimizer.register_step_post_hook(lambda own, args, kwargs: calls.append(("after", own, args, kwargs)))
    everywhere = register_optimizer_step_post_hook(lambda own, args, kwargs: calls.append(own))
    try:
        backward(parameters, 0)
        optimizer.fuse_step()
    finally:
        everywhere.remove()
    assert calls == [("before", optimizer, (optimizer,), {}), ("after", optimizer, (optimizer,), {}), optimizer]


def test_a_hook_before_the_step_may_change_gradients() -> None:
    results = []
    for kind in (CONFIGS[0], fused(CONFIGS[0])):
        parameters = parameters_of()
        optimizer = kind(parameters)
        optimizer.register_step_pre_hook(lambda *_, ps=parameters: nn.utils.clip_grad_norm_(ps, 1.0) and None)
        train(optimizer, parameters, range(5))
        results.append([p.detach() for p in parameters])
    assert_same(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_loss_of_the_closure_is_returned(set_to_none: bool) -> None:
    results = []
    for kind in (CONFIGS[2], fused(CONFIGS[2])):
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        losses = []

        def closure(optimizer: Any = optimizer, parameters: Any = parameters) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            assert torch.is_grad_enabled()
            loss: torch.Tensor = sum((p**2).sum() for p in parameters)
            loss.backward()
            return loss

        for _ in range(5):
            step = optimizer.fuse_step if is_fused_optimizer(optimizer) else optimizer.step
            with torch.no_grad():
                losses.append(step(closure))
        results.append((losses, [p.detach() for p in parameters]))
    assert_same(*results)
    assert results[0][0][0] > results[0][0][-1] > 0


def test_a_step_without_closure_returns_nothing() -> None:
    parameters = parameters_of()
    optimizer = fuse_optimizer(optim.SGD(parameters))
    assert optimizer.fuse_step() is None
    backward(parameters, 0)
    assert fuse_step(optimizer) is None


def test_an_optimizer_that_is_not_fused_has_no_fused_step() -> None:
    optimizer = optim.SGD(parameters_of())
    fuse_optimizer(optim.SGD(parameters_of()))
    assert not is_fused_optimizer(optimizer)
    with pytest.raises(RuntimeError, match=r"needs an optimizer that went through fuse_optimizer\(\)"):
        fuse_step(optimizer)


def test_the_method_keeps_its_optimizer() -> None:
    parameters = parameters_of([(3,), (4,)])
    weights = [p.detach().clone() for p in parameters]
    step = fuse_optimizer(optim.SGD(parameters, lr=1.0)).fuse_step
    for p in parameters:
        p.grad = torch.ones_like(p)
    step()
    assert_same([p.detach() for p in parameters], [weight - 1 for weight in weights])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_a_copy_is_a_plain_optimizer_with_the_same_state(duplicate: Callable[[Any], Any]) -> None:
    parameters = parameters_of()
    optimizer = fuse_optimizer(CONFIGS[2](parameters))
    train(optimizer, parameters, range(4))
    twin = duplicate(optimizer)
    assert not is_fused_optimizer(twin)
    assert_same(twin.state_dict(), optimizer.state_dict())
    own = twin.param_groups[0]["params"]
    train(fuse_optimizer(twin), own, range(4, 8))
    train(optimizer, parameters, range(4, 8))
    assert_same([p.detach() for p in own], [p.detach() for p in parameters])


def test_autograd_notices_that_weights_have_changed() -> None:
    parameters = parameters_of([(3,), (4,)])
    optimizer = fuse_optimizer(optim.SGD(parameters, lr=0.1))
    loss = sum((p**2).sum() for p in parameters)
    assert isinstance(loss, torch.Tensor)
    loss.backward(retain_graph=True)
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_error_in_the_step_leaves_the_optimizer_as_it_was() -> None:
    parameters = parameters_of()
    optimizer = fuse_optimizer(optim.NAdam(two_groups(parameters)))
    train(optimizer, parameters, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    backward(parameters, 3)
    parameters[1].grad = torch.ones(5).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.fuse_step()
    assert_same(optimizer.state_dict(), state)
    assert [p for group in optimizer.param_groups for p in group["params"]] == parameters
    train(optimizer, parameters, range(3, 5))
    assert optimizer._bagua_fused_count == 10


def test_a_sparse_gradient_is_stepped_by_itself() -> None:
    results = []
    for kind in (CONFIGS[1], fused(CONFIGS[1])):
        table, parameters = nn.Embedding(10, 3, sparse=True), parameters_of()
        with torch.no_grad():
            table.weight.copy_(torch.arange(30.0).view(10, 3))
        optimizer: Any = kind([*parameters, *table.parameters()])
        for step in range(5):
            optimizer.zero_grad()
            backward(parameters, step)
            table(torch.tensor([1, 4])).sum().backward()
            take_step(optimizer)
        results.append([p.detach() for p in [*parameters, table.weight]])
    assert_same(*results)
    assert optimizer._bagua_fused_count == 5


def test_an_optimizer_goes_when_its_last_user_does() -> None:
    parameters = parameters_of()
    optimizer = fuse_optimizer(optim.Adam(parameters))
    train(optimizer, parameters, range(2))
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
