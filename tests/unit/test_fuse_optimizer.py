# SPDX-License-Identifier: Apache-2.0
"""Fused steps are those of the plain optimizer, to the bit, in fewer operations."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from bagua import QAdamOptimizer
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse._elementwise import cpu_kernels_keep_bits
from fused_training import (
    DEVICES,
    Factory,
    assert_same_both_ways,
    assert_same_training,
    backward,
    fused,
    parameters_of,
    take_step,
)
from torch import nn, optim
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.any_device

# The 21 configurations of the original's tests, but for its momentum of 1 in RMSprop, which lets weights grow for ever.
ORIGINAL: list[Any] = [
    *(partial(optim.Adam, weight_decay=w, amsgrad=a) for w in (1.0, 0.0) for a in (True, False)),
    *(partial(optim.AdamW, weight_decay=w, amsgrad=a) for w in (1.0, 0.0) for a in (True, False)),
    partial(optim.SGD, lr=0.2, momentum=1, dampening=0, weight_decay=1, nesterov=True),
    partial(optim.SGD, lr=0.2, momentum=1, dampening=0.5, weight_decay=1, nesterov=False),
    partial(optim.RMSprop, weight_decay=1, momentum=0.9, centered=True),
    partial(optim.RMSprop, weight_decay=1, momentum=0, centered=True),
    partial(optim.RMSprop, weight_decay=1, momentum=0.9, centered=False),
    partial(optim.RMSprop, weight_decay=0, momentum=0.9, centered=False),
    partial(optim.Rprop, lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50)),
    partial(optim.ASGD, weight_decay=0),
    partial(optim.ASGD, weight_decay=1),
    partial(optim.Adamax, weight_decay=0),
    partial(optim.Adamax, weight_decay=1),
    partial(optim.Adadelta, weight_decay=0),
    partial(optim.Adadelta, weight_decay=1),
]
FURTHER: list[Any] = [
    partial(optim.SGD, lr=0.05),
    partial(optim.SGD, lr=0.05, momentum=0.9, maximize=True, weight_decay=3.0),
    partial(optim.Adam, maximize=True, amsgrad=True),
    partial(optim.Adam, lr=torch.tensor(0.01)),
    partial(optim.AdamW, maximize=True),
    partial(optim.Adam, weight_decay=0.1, foreach=True),
    partial(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    partial(optim.ASGD, foreach=True),
    partial(optim.RMSprop, maximize=True),
    partial(optim.ASGD, t0=3, lambd=0.1),
    partial(optim.Adagrad, lr_decay=0.1, weight_decay=0.1),
    partial(optim.Adagrad, initial_accumulator_value=0.5),
    partial(optim.NAdam, weight_decay=0.1),
    partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    partial(optim.RAdam, weight_decay=0.1),
    partial(optim.RAdam, weight_decay=0.1, decoupled_weight_decay=True),
    partial(QAdamOptimizer, warmup_steps=6, weight_decay=0.1),
]
# Flags that are for GPUs, or whose kernels keep their bits only there.
ON_GPUS: list[Any] = [
    partial(optim.Adam, weight_decay=0.1, foreach=False),
    partial(optim.Adam, weight_decay=0.1, fused=True),
    partial(optim.Adam, amsgrad=True, capturable=True),
    partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    partial(optim.NAdam, capturable=True),
    partial(optim.ASGD, capturable=True),
]
if "cuda_unsupported=True" not in inspect.getsource(optim.Adagrad):  # torch 2.11 has no fused one for GPUs
    ON_GPUS.append(partial(optim.Adagrad, fused=True))
CASES = [(device, config) for device in DEVICES for config in ORIGINAL + FURTHER + ON_GPUS * (device == "cuda")]


def _name(config: Any) -> str:
    return "-".join([config.func.__name__, *(f"{key}={value}" for key, value in config.keywords.items())])


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize(("device", "config"), CASES, ids=[f"{device}-{_name(config)}" for device, config in CASES])
def test_fused_steps_are_plain_steps_to_the_bit(device: str, config: Any, set_to_none: bool) -> None:
    optimizer = assert_same_training(config, make=lambda: parameters_of(device=device), set_to_none=set_to_none)
    assert optimizer._bagua_fused_count == 24 * 2  # each step, each group


@pytest.mark.parametrize("config", [ORIGINAL[0], ORIGINAL[9], FURTHER[-1]], ids=_name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_other_types_keep_their_bits_and_are_fused_where_the_kernels_allow_it(
    device: str, config: Any, dtype: torch.dtype
) -> None:
    optimizer = assert_same_training(config, make=lambda: parameters_of(device=device, dtype=dtype))
    assert optimizer._bagua_fused_count == (24 * 2 if device == "cuda" or cpu_kernels_keep_bits(dtype) else 0)


def test_types_of_64_and_32_bits_are_fused_on_this_cpu() -> None:
    assert cpu_kernels_keep_bits(torch.float64)
    assert cpu_kernels_keep_bits(torch.float32)


@pytest.mark.parametrize("config", [ORIGINAL[0], FURTHER[1]], ids=_name)
def test_bits_do_not_depend_on_how_threads_share_a_tensor(config: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        # torch gives a thread 32768 values at least; none of these sizes and their sums can be divided evenly.
        optimizer = assert_same_training(config, make=lambda: parameters_of([(40001,), (7,), (65521,), (33333,), (5,)]))
    finally:
        torch.set_num_threads(threads)
    assert optimizer._bagua_fused_count == 24 * 2


def _mixed_parameters() -> list[nn.Parameter]:
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    mixed = zip(*(parameters_of(dtype=dtype) for dtype in kinds), strict=True)
    return [p for same_shape in mixed for p in same_shape]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("config", [ORIGINAL[0], FURTHER[0], FURTHER[-1]], ids=_name)
def test_several_types_in_one_group(config: Any, set_to_none: bool) -> None:
    optimizer = assert_same_training(config, make=_mixed_parameters, set_to_none=set_to_none)
    assert optimizer._bagua_fused_count == 24 * 2


def _operators(number: int, config: Any, *, set_to_none: bool, nested: bool) -> int:
    """How many operators a step calls for this many parameters; `nested` ones are called by another one."""
    parameters = parameters_of([(3,)] * number)
    optimizer = config(parameters)
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(parameters, step)
        if step < 2:
            take_step(optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        take_step(optimizer)
    events = [event for event in profiled.events() or [] if event.name.startswith("aten::")]
    names = {event.name for event in events}
    return sum(nested or event.cpu_parent is None or event.cpu_parent.name not in names for event in events)


@pytest.mark.parametrize("config", ORIGINAL + FURTHER, ids=_name)
def test_the_number_of_operators_does_not_grow_with_the_number_of_parameters(config: Any) -> None:
    kept = partial(_operators, config=fused(config), set_to_none=False, nested=True)
    assert kept(40) == kept(4)
    assert kept(40) < _operators(40, config, set_to_none=False, nested=True)
    # New gradients are copied, each one, by a single operator.
    new = partial(_operators, config=fused(config), set_to_none=True)
    assert new(40, nested=False) == new(4, nested=False)
    assert new(40, nested=True) == new(4, nested=True) + 36


@pytest.mark.parametrize("kind", ["LBFGS", "Muon", "Adafactor", "SparseAdam"])
def test_an_optimizer_that_is_not_elementwise_is_refused(kind: str) -> None:
    optimizer = getattr(optim, kind)([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(TypeError, match=rf"cannot fuse {kind}: its? .*, so fused parameters would get other updates"):
        fuse_optimizer(optimizer)


class _Lion(optim.SGD):
    bagua_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("momentum", torch.zeros_like(p))
                    p.sub_(torch.lerp(old, p.grad, 0.1).sign(), alpha=group["lr"])
                    self.state[p] = {"momentum": torch.lerp(old, p.grad, 0.01), "last_lr": group["lr"]}
        return "taken"


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expects a torch.optim.Optimizer, got Linear"):
        fuse_optimizer(nn.Linear(2, 2))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_class_that_declares_itself_elementwise_is_fused(set_to_none: bool) -> None:
    optimizer = assert_same_training(partial(_Lion, lr=0.1), set_to_none=set_to_none)
    assert optimizer._bagua_fused_count == 24 * 2
    assert optimizer.param_groups[0]["taken"] == 24
    assert optimizer.fuse_step() == "taken"  # without a closure the result is that of the class


class _RowSums(optim.SGD):
    bagua_elementwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sums"] = torch.zeros(2, 2)


def test_a_state_that_cannot_be_divided_is_an_error() -> None:
    optimizer = fuse_optimizer(_RowSums(parameters_of(), lr=0.1))
    backward([p for group in optimizer.param_groups for p in group["params"]], 0)
    with pytest.raises(RuntimeError, match=r"state 'sums' of a fused run .* \(2, 2\)"):
        optimizer.fuse_step()
    # The parameters are in their places again.
    assert len(optimizer.param_groups[0]["params"]) == 7


def test_fusing_twice_is_an_error() -> None:
    optimizer = fuse_optimizer(optim.SGD(parameters_of(), lr=0.1))
    with pytest.raises(RuntimeError, match="trying to fuse an optimizer twice!"):
        fuse_optimizer(optimizer)


def test_the_cpu_kernels_of_fused_optimizers_which_would_change_bits_are_left_alone() -> None:
    optimizer = assert_same_training(partial(optim.Adam, fused=True))
    assert optimizer._bagua_fused_count == 0


def test_a_flag_that_is_set_in_between_counts() -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        for step in range(12):
            # A checkpoint may bring it, too.
            optimizer.param_groups[0]["fused"] = True if 4 <= step < 8 else None
            optimizer.zero_grad()
            backward(parameters, step)
            take_step(optimizer)
        return parameters, optimizer

    assert assert_same_both_ways(partial(optim.Adam, lr=0.05), run)._bagua_fused_count == 8


def test_a_differentiable_step_is_left_alone() -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = [torch.ones(3), torch.ones(4)]
        addresses = [p.data_ptr() for p in parameters]
        for p in parameters:
            p.grad = torch.full_like(p, 0.5)
        optimizer = kind([{"params": parameters, "differentiable": True}])
        take_step(optimizer)
        assert addresses == [p.data_ptr() for p in parameters]
        return parameters, optimizer

    assert assert_same_both_ways(optim.Adam, run)._bagua_fused_count == 0
