# SPDX-License-Identifier: Apache-2.0
"""Fused steps between plain ones, with gradients that come and go, and around checkpoints."""

import copy
import pickle
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from bagua import QAdamOptimizer
from bagua.torch_api.contrib.fuse.optimizer import is_fused_optimizer
from fused_training import (
    DEVICES,
    Factory,
    assert_same,
    assert_same_both_ways,
    assert_same_training,
    fused,
    in_both_modes,
    parameters_of,
    train,
    two_groups,
)
from torch import optim

pytestmark = pytest.mark.any_device

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
    name: str = getattr(config, "func", config).__name__
    return name


in_each_way = pytest.mark.parametrize("config", CONFIGS, ids=_name)

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


@in_each_way
def test_numbers_that_part_in_plain_steps_are_noticed(config: Any) -> None:
    assert_same_training(
        config,
        without=lambda step: {1, 5} if step in (8, 9) else (),
        fusing=lambda step: step not in (8, 9),
    )


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
    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = parameters_of()
        for p in parameters[:3]:
            p.requires_grad = False
        optimizer: Any = kind(two_groups(parameters, lr=0.02))
        train(optimizer, parameters, range(8), set_to_none=set_to_none)
        for p in parameters[:3]:
            p.requires_grad = True
        train(optimizer, parameters, range(8, 24), set_to_none=set_to_none)
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    # In the first group only one parameter and a half are left at first.
    assert optimizer._bagua_fused_count >= 8 + 2 * 16


def _serves_added_groups(config: Any) -> bool:
    early, late = parameters_of()[:2]
    optimizer: Any = config([early])
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    try:
        optimizer.step()
    except KeyError:
        assert isinstance(optimizer, optim.Adagrad)
        return False
    return True


@in_each_way
def test_a_parameter_group_may_be_added(config: Any) -> None:
    if not _serves_added_groups(config):
        pytest.skip("the Adagrad of this torch fails with a group that was added")

    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = parameters_of()
        optimizer: Any = kind(parameters[:4])
        train(optimizer, parameters, range(8))
        optimizer.add_param_group({"params": parameters[4:], "lr": 0.3})
        train(optimizer, parameters, range(8, 24))
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 8 + 2 * 16


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
