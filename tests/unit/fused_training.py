# SPDX-License-Identifier: Apache-2.0
"""A plain optimizer beside the fused one: weights, gradients and state, to the bit."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from bagua.torch_api.contrib.fuse import fuse_optimizer, is_fused_optimizer
from torch import Tensor, nn, optim

# Sizes that fill a vector register, that do not, and that leave a rest; the fourth is in channels_last order.
SHAPES = ((7, 5), (5,), (64,), (3, 7, 2, 2), (1,), (33, 3), (1, 1))


# As the original's tests have them, and further ones.
CONFIGS: list[Any] = [
    *(partial(optim.Adam, weight_decay=w, amsgrad=a) for w in (1.0, 0.0) for a in (True, False)),
    partial(optim.AdamW, weight_decay=1.0, maximize=True),
    partial(optim.Adam, weight_decay=0.1, foreach=True),
    partial(optim.Adam, lr=torch.tensor(0.01)),
    partial(optim.SGD, lr=0.05),
    partial(optim.SGD, lr=0.2, momentum=1, dampening=0, weight_decay=1, nesterov=True),
    partial(optim.RMSprop, weight_decay=1, momentum=0.9, centered=True),
    partial(optim.RMSprop, weight_decay=0, momentum=0.9),
    partial(optim.Rprop, lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50)),
    partial(optim.ASGD, weight_decay=1, t0=3),
    partial(optim.Adamax, weight_decay=1),
    partial(optim.Adadelta, weight_decay=1),
    partial(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    partial(optim.NAdam, weight_decay=0.1),
    partial(optim.RAdam, weight_decay=0.1),
]


ADAM, SGD = CONFIGS[0], CONFIGS[8]


def name_of(config: Any) -> str:
    return "-".join([config.func.__name__, *(f"{key}={value}" for key, value in config.keywords.items())])


def new_parameters(shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator(device="cpu").manual_seed(1)
    device = torch.get_default_device()
    values = [torch.randn(tuple(s), generator=generator, device="cpu").to(device, dtype) for s in shapes]
    return [nn.Parameter(v.to(memory_format=torch.channels_last) if v.dim() == 4 else v) for v in values]


def run_backward(parameters: Sequence[Tensor], step: int, without: Sequence[int] = ()) -> None:
    """Make gradients that differ from step to step; none for the parameters whose index is in `without`."""
    generator = torch.Generator(device="cpu").manual_seed(100 + step)
    loss = torch.zeros((), dtype=torch.float64)
    for i, p in enumerate(parameters):
        target = torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype)
        if i not in without and p.requires_grad:
            loss = loss + (p - target).square().sum().double()
    loss.backward()  # type: ignore[no-untyped-call]


Train = Callable[[Any, list[nn.Parameter]], None]


def some_steps(count: int = 12, *, set_to_none: bool = True, fuses: Callable[[int], bool] = lambda step: True) -> Train:
    def train(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        for step in range(count):
            optimizer.zero_grad(set_to_none=set_to_none)
            run_backward(parameters, step)
            step_of(optimizer, fuses=fuses(step))

    return train


def step_of(optimizer: Any, *, fuses: bool = True) -> Any:
    return optimizer.fuse_step() if fuses and is_fused_optimizer(optimizer) else optimizer.step()


def assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert one == other, where


def compare(config: Any, train: Train, make: Callable[[], list[nn.Parameter]] = new_parameters) -> Any:
    """Train the same in two groups with a plain and with a fused optimizer, and return the fused one."""
    both: list[tuple[Any, list[nn.Parameter]]] = []
    for fuse in (lambda optimizer: optimizer, fuse_optimizer):
        parameters = make()
        half = len(parameters) // 2 + 1
        optimizer = fuse(config([{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.02}]))
        train(optimizer, parameters)
        both.append((optimizer, parameters))
    (plain, expected), (fused, weights) = both
    assert all(p.isfinite().all() for p in expected), "a weight that is not finite would hide differences"
    assert_same([p.detach() for p in weights], [p.detach() for p in expected], "weights")
    assert_same([p.grad for p in weights], [p.grad for p in expected], "gradients")
    assert_same(fused.state_dict(), plain.state_dict(), "state")
    return fused


def sizes_of_runs(optimizer: Any) -> list[list[int]]:
    """How many parameters each run of the last fused step held, for each group."""
    return [[len(run.parameters) for run in runs] for runs in optimizer._bagua_fusion._runs]
