# SPDX-License-Identifier: Apache-2.0
"""Fused optimizers with what else takes part in training: schedules, scalers, hooks, closures."""

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
    Factory,
    assert_same,
    assert_same_both_ways,
    backward,
    fused,
    in_both_modes,
    parameters_of,
    take_step,
    train,
    two_groups,
)
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

sgd = partial(optim.SGD, lr=0.05, momentum=0.9)
adam = partial(optim.Adam, weight_decay=0.1, amsgrad=True)
with_either = pytest.mark.parametrize("config", [adam, sgd], ids=["Adam", "SGD"])


def _schedules(optimizer: Any) -> list[Any]:
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    return [schedule, LambdaLR(optimizer, lambda step: 0.9**step)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("replacing", ["never", "before", "after"])
@with_either
def test_learning_rate_schedules_act_and_see_the_steps(config: Any, replacing: str) -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
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
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 48


@in_both_modes
@pytest.mark.parametrize("by_hand", [True, False], ids=["fuse_step", "scaler.step"])
@with_either
def test_a_gradient_scaler_skips_steps_with_infinite_gradients(config: Any, by_hand: bool, set_to_none: bool) -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
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
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    # Of 24 steps, 3, 8, 13, 18 and 23 are skipped.
    assert optimizer._bagua_fused_count == 19 * 2


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
    config = partial(QAdamOptimizer, lr=0.1, warmup_steps=3)

    def run(kind: Factory) -> tuple[Any, Any]:
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
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 12
    assert not optimizer._handed_out


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
    for kind in (sgd, fused(sgd)):
        parameters = parameters_of()
        optimizer = kind(parameters)

        def clip(*_: Any, parameters: Any = parameters) -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)

        optimizer.register_step_pre_hook(clip)
        train(optimizer, parameters, range(5))
        results.append([p.detach() for p in parameters])
    assert_same(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_loss_of_the_closure_is_returned(set_to_none: bool) -> None:
    results = []
    for kind in (adam, fused(adam)):
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        losses = []

        def closure(optimizer: Any = optimizer, parameters: Any = parameters) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            assert torch.is_grad_enabled()
            loss: torch.Tensor = sum((p**2).sum() for p in parameters)
            loss.backward()  # type: ignore[no-untyped-call]
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
    optimizer = fuse_optimizer(adam(parameters))
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
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


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
    def run(kind: Factory) -> tuple[Any, Any]:
        table, parameters = nn.Embedding(10, 3, sparse=True), parameters_of()
        with torch.no_grad():
            table.weight.copy_(torch.arange(30.0).view(10, 3))
        optimizer: Any = kind([*parameters, *table.parameters()])
        for step in range(5):
            optimizer.zero_grad()
            backward(parameters, step)
            table(torch.tensor([1, 4])).sum().backward()
            take_step(optimizer)
        table.weight.grad = None
        return [*parameters, table.weight], optimizer

    optimizer = assert_same_both_ways(partial(optim.SGD, lr=0.05), run)
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
