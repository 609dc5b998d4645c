# SPDX-License-Identifier: Apache-2.0
"""What becomes of weights, gradients and state that are moved by others while a fused optimizer is at work."""

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from bagua.torch_api.contrib import fuse_optimizer
from fused_training import (
    Factory,
    assert_same,
    assert_same_both_ways,
    assert_same_training,
    backward,
    fused,
    in_both_modes,
    parameters_of,
    storages_of,
    take_step,
    train,
)
from torch import Tensor, nn, optim

adam = partial(optim.Adam, lr=0.05, weight_decay=0.1)
sgd = partial(optim.SGD, lr=0.05, momentum=0.9)
with_either = pytest.mark.parametrize("config", [adam, sgd], ids=["Adam", "SGD"])


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    assert all(record.name == "bagua" and record.levelno == logging.WARNING for record in caplog.records)
    caplog.clear()
    return found


@pytest.mark.parametrize("check_flatten", [True, False])
@in_both_modes
@with_either
def test_weights_that_were_moved_are_moved_back(
    config: Any, set_to_none: bool, check_flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = parameters_of()
    train(config(expected), expected, range(12), set_to_none=set_to_none)
    parameters = parameters_of()
    optimizer = fuse_optimizer(config(parameters), check_flatten=check_flatten)
    train(optimizer, parameters, range(4), set_to_none=set_to_none)
    for p in parameters[2:4]:
        p.data = p.data.clone()
    train(optimizer, parameters, [4], set_to_none=set_to_none)
    messages = _messages(caplog)
    assert [message[:40] for message in messages] == ["fuse_step: the weights of 2 parameters w"] * check_flatten
    assert len(storages_of(parameters)) == 1
    train(optimizer, parameters, range(5, 12), set_to_none=set_to_none)
    assert not _messages(caplog)
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected])
    assert optimizer._bagua_fused_count == 12


@with_either
def test_weights_that_were_moved_to_memory_of_others_stay_there(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        train(optimizer, parameters, range(4))
        elsewhere = parameters[2].data.clone()
        parameters[2].data = elsewhere
        parameters[1].data = parameters[5].data[1]  # now tied, without a word to anybody
        tied = parameters[:1] + parameters[2:]
        train(optimizer, tied, range(4, 10))
        assert parameters[2].data_ptr() == elsewhere.data_ptr()
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert [message[:40] for message in _messages(caplog)] == ["fuse_step: the weights of 2 parameters w"]
    assert optimizer._bagua_fused_count == 10


@pytest.mark.parametrize("change", ["type", "order", "assigned"])
@with_either
def test_a_model_that_changes_altogether_is_flattened_again(config: Any, change: str) -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Conv2d(5, 3, 2))
        images = torch.randn(2, 3, 4, 4)
        optimizer: Any = kind(model.parameters())
        for step in range(10):
            if step == 5:
                if change == "type":
                    model.double()
                    images = images.double()
                elif change == "order":
                    model.to(memory_format=torch.channels_last)
                    for state in optimizer.state.values():
                        for name, value in state.items():
                            if value.dim() == 4:
                                state[name] = value.contiguous(memory_format=torch.channels_last)
                else:
                    for p in model.parameters():
                        p.data = p.data.clone()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            model(images).square().sum().backward()
            take_step(optimizer)
        return list(model.parameters()), optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 10
    # Biases have no order, and stay where they are.
    assert len(storages_of(optimizer.param_groups[0]["params"])) == (2 if change == "order" else 1)


def test_states_that_are_exchanged_stay_exchanged() -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = parameters_of([(4,), (4,), (5,)])
        optimizer: Any = kind(parameters)
        train(optimizer, parameters, range(3))
        one, other = (optimizer.state[p] for p in parameters[:2])
        one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
        train(optimizer, parameters, range(3, 6))
        return parameters, optimizer

    assert assert_same_both_ways(adam, run)._bagua_fused_count == 6


@with_either
def test_state_in_another_order_than_the_weights_is_put_into_theirs(config: Any) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        train(optimizer, parameters, range(3))
        checkpoint = copy.deepcopy(optimizer.state_dict())
        for name, value in checkpoint["state"][3].items():
            checkpoint["state"][3][name] = value.contiguous()  # the weight is channels_last
        optimizer.load_state_dict(checkpoint)
        train(optimizer, parameters, range(3, 8))
        results.append([p.detach() for p in parameters])
    assert_same(*results)
    assert optimizer._bagua_fused_count == 8
    moments = [value for value in optimizer.state[parameters[3]].values() if value.dim() > 0]
    assert all(value.stride() == parameters[3].stride() for value in moments)


@pytest.mark.parametrize("check_flatten", [True, False])
def test_state_that_was_replaced_is_moved_back(check_flatten: bool, caplog: pytest.LogCaptureFixture) -> None:
    expected = parameters_of()
    plain = adam(expected)
    parameters = parameters_of()
    optimizer = fuse_optimizer(adam(parameters), check_flatten=check_flatten)
    for own, weights in ((plain, expected), (optimizer, parameters)):
        train(own, weights, range(4))
        own.state[weights[1]]["exp_avg"] = torch.full((5,), 0.25)
        own.state[weights[2]]["exp_avg"].data = torch.full((64,), 0.5)
        own.state[weights[5]]["step"] += 3
        own.state[weights[6]] = {**own.state[weights[6]], "step": torch.tensor(9.0)}
        train(own, weights, [4])
    assert [message[:38] for message in _messages(caplog)] == ["fuse_step: the optimizer's state of 3 "] * check_flatten
    train(plain, expected, range(5, 12))
    train(optimizer, parameters, range(5, 12))
    assert not _messages(caplog)
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected])
    assert_same(optimizer.state_dict(), plain.state_dict())
    assert optimizer._bagua_fused_count == 12


@pytest.mark.parametrize("check_flatten", [True, False])
@with_either
def test_kept_gradients_live_side_by_side_until_they_are_replaced(
    config: Any, check_flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = parameters_of()
    train(config(expected), expected, range(12))
    parameters = parameters_of()
    optimizer = fuse_optimizer(config(parameters), check_flatten=check_flatten)
    train(optimizer, parameters, [0], set_to_none=False)
    kept = [p.grad for p in parameters]
    train(optimizer, parameters, range(1, 4), set_to_none=False)
    assert all(p.grad is grad for p, grad in zip(parameters, kept, strict=True))
    assert len(storages_of(kept)) == 1
    values = [grad.clone() for grad in kept if grad is not None]
    train(optimizer, parameters, [4])
    messages = _messages(caplog)
    assert [message[:42] for message in messages] == ["fuse_step: the gradients of 7 parameters w"] * check_flatten
    train(optimizer, parameters, range(5, 9), set_to_none=False)
    train(optimizer, parameters, range(9, 12))
    assert not _messages(caplog)
    assert_same(kept, values)  # those who hold old gradients find them as they were
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected])
    assert optimizer._bagua_fused_count == 12


def test_gradients_that_somebody_keeps_are_not_overwritten() -> None:
    parameters = parameters_of()
    optimizer = fuse_optimizer(adam(parameters))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(6):
        optimizer.zero_grad()
        backward(parameters, step)
        kept += [(p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
        optimizer.fuse_step()
    assert_same(*zip(*kept, strict=True))


def test_gradients_that_are_part_of_something_larger_stay_there() -> None:
    parameters = parameters_of([(3,), (4,), (5,)])
    optimizer = fuse_optimizer(adam(parameters))
    bucket = torch.zeros(12)
    for p, part in zip(parameters, torch.split(bucket, [3, 4, 5]), strict=True):
        p.grad = part
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        backward(parameters, step)
        optimizer.fuse_step()
    assert storages_of(p.grad for p in parameters) == storages_of([bucket])
    assert bucket.count_nonzero() == 12
    assert optimizer._bagua_fused_count == 4


class _Decaying(optim.SGD):
    bagua_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.1)  # as many optimizers do it
                p.sub_(p.grad, alpha=group["lr"])


@in_both_modes
def test_what_the_optimizer_does_to_gradients_is_seen(set_to_none: bool) -> None:
    optimizer = assert_same_training(partial(_Decaying, lr=0.1), set_to_none=set_to_none)
    assert optimizer._bagua_fused_count == 48


def test_a_model_and_its_optimizer_can_be_copied_together() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = fuse_optimizer(adam(model.parameters()))
    twin = copy.deepcopy(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.fuse_step()
    assert not storages_of(model.parameters()) & storages_of(twin.parameters())
    assert not torch.equal(model[0].weight, twin[0].weight)


@with_either
def test_a_weight_that_is_turned_around_in_its_memory_is_noticed(config: Any) -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = parameters_of([(4, 4), (5,), (6,)])
        optimizer: Any = kind(parameters)
        train(optimizer, parameters, range(3))
        parameters[0].data = parameters[0].data.t()
        for step in range(3, 6):
            backward(parameters, step, without={0})
            parameters[0].grad = torch.arange(16.0).view(4, 4) / 16
            take_step(optimizer)
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 6
