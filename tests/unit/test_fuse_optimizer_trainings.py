# SPDX-License-Identifier: Apache-2.0
"""What trainings do beside their steps acts on a fused optimizer as on a plain one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bagua.torch_api.contrib.fuse import is_fused_optimizer
from fused_training import (
    ADAM,
    SGD,
    Train,
    compare,
    name_of,
    new_parameters,
    run_backward,
    sizes_of_runs,
    some_steps,
    step_of,
)
from torch import nn, optim

pytestmark = pytest.mark.any_device


def _some_gradients_missing(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    for step in range(8):
        optimizer.zero_grad()
        run_backward(parameters, step, without=[step % 3, 5] if step % 2 else [])
        step_of(optimizer)


def _one_joins(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    parameters[2].requires_grad_(False)
    some_steps(3)(optimizer, parameters)
    parameters[2].requires_grad_(True)
    extra = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [extra]})
    some_steps(3)(optimizer, [*parameters, extra])


def _one_changes_its_group(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    some_steps(3)(optimizer, parameters)
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    some_steps(3)(optimizer, parameters)


def _state_is_loaded(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    some_steps(3)(optimizer, parameters)
    state = copy.deepcopy(optimizer.state_dict())
    some_steps(3)(optimizer, parameters)
    optimizer.load_state_dict(state)
    some_steps(3)(optimizer, parameters)


def _state_is_cleared(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    some_steps(3)(optimizer, parameters)
    optimizer.state.clear()
    some_steps(3)(optimizer, parameters)


def _learning_rate_is_scheduled(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        optimizer.zero_grad()
        run_backward(parameters, step)
        step_of(optimizer)
        schedule.step()


def _gradients_are_scaled(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    if is_fused_optimizer(optimizer):
        optimizer.step = optimizer.fuse_step
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    for step in range(5):
        optimizer.zero_grad()
        loss = sum((p.square().sum() * (float("inf") if step == 2 else 1.0) for p in parameters), torch.zeros(()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    vars(optimizer).pop("step", None)


@pytest.mark.filterwarnings("error:.*lr_scheduler")
@pytest.mark.parametrize(
    "train",
    [
        _some_gradients_missing,
        _one_joins,
        _one_changes_its_group,
        _state_is_loaded,
        _state_is_cleared,
        _learning_rate_is_scheduled,
        _gradients_are_scaled,
    ],
)
@pytest.mark.parametrize("config", [ADAM, SGD], ids=name_of)
def test_what_trainings_do_besides_acts_as_with_the_plain_optimizer(config: Any, train: Train) -> None:
    compare(config, train)


def _of_two_types() -> list[nn.Parameter]:
    mixed = zip(new_parameters(), new_parameters(dtype=torch.float64), strict=True)
    return [p for same_shape in mixed for p in same_shape]


def _of_odd_kinds() -> list[nn.Parameter]:
    """0-dim, empty, transposed, tied to the memory of another, and plain ones."""
    base = torch.randn(6, 4, generator=torch.Generator(device=torch.get_default_device()).manual_seed(2))
    tied = torch.arange(12.0)
    return [
        nn.Parameter(torch.tensor(2.0)),
        nn.Parameter(torch.empty(0)),
        nn.Parameter(base.t()),
        nn.Parameter(tied[:8]),
        nn.Parameter(tied[4:]),
        *new_parameters(),
    ]


@pytest.mark.parametrize("make", [_of_two_types, _of_odd_kinds])
@pytest.mark.parametrize("config", [ADAM, SGD], ids=name_of)
def test_parameters_of_all_kinds_get_their_plain_steps(config: Any, make: Callable[[], list[nn.Parameter]]) -> None:
    optimizer = compare(config, some_steps(), make)
    assert any(sizes_of_runs(optimizer))
