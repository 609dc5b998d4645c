# SPDX-License-Identifier: Apache-2.0
"""Trains the same parameters with a plain and with a fused optimizer."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse.optimizer import is_fused_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Sizes that fill a vector register, that do not, and that leave a rest; the fourth is in channels_last order.
SHAPES = ((7, 5), (5,), (64,), (3, 7, 2, 2), (1,), (33, 3), (1, 1))

Factory = Callable[[Any], Optimizer]

in_both_modes = pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])


def parameters_of(
    shapes: Sequence[Sequence[int]] = SHAPES, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Parameters with the same values at each call."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(tuple(shape), generator=generator).to(device, dtype) for shape in shapes]
    return [nn.Parameter(v.to(memory_format=torch.channels_last) if v.dim() == 4 else v) for v in values]


def backward(parameters: Sequence[Tensor], step: int, without: Collection[int] = ()) -> None:
    """Gradients that differ from step to step; none for the parameters whose index is in `without`."""
    generator = torch.Generator().manual_seed(100 + step)
    loss = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for i, p in enumerate(parameters):
        target = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if i not in without and p.requires_grad:
            loss = loss + (p - target).square().sum().double()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


def storages_of(tensors: Iterable[Any]) -> set[int]:
    """Their addresses."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def two_groups(parameters: Sequence[Tensor], **second: Any) -> list[dict[str, Any]]:
    """The parameters in two groups, of which the second has options of its own."""
    half = len(parameters) // 2 + 1
    return [{"params": list(parameters[:half])}, {"params": list(parameters[half:]), **second}]


def fused(factory: Factory, **options: Any) -> Factory:
    """A factory of fused optimizers."""
    return lambda groups: fuse_optimizer(factory(groups), **options)


def take_step(optimizer: Optimizer, *, fusing: bool = True) -> None:
    """A fused step where the optimizer has them and `fusing` is on, else a plain one."""
    if fusing and is_fused_optimizer(optimizer):
        optimizer.fuse_step()  # type: ignore[attr-defined]
    else:
        optimizer.step()


def train(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    steps: Sequence[int],
    *,
    set_to_none: bool = True,
    without: Callable[[int], Collection[int]] = lambda step: (),
    fusing: Callable[[int], bool] = lambda step: True,
) -> None:
    """Steps numbered as given, which determines their gradients."""
    for step in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(parameters, step, without(step))
        take_step(optimizer, fusing=fusing(step))


def assert_same(one: Any, other: Any, *, where: str = "") -> None:
    """Two structures with tensors are equal, to the bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), where
        assert torch.equal(one, other), f"{where}: {(one != other).sum()} of {one.numel()} values differ"
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], where=f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, where=f"{where}[{i}]")
    else:
        assert one == other, where


def assert_same_both_ways(
    factory: Factory,
    run: Callable[[Factory], tuple[Sequence[Tensor], Any]],
    *,
    fuse: Callable[[Factory], Factory] = fused,
) -> Any:
    """`run` trains with the factory it is given, and returns parameters and optimizer: the same, plain and fused.

    Returns the fused optimizer.
    """
    (plain, plain_optimizer), (weights, optimizer) = (run(kind) for kind in (factory, fuse(factory)))
    # A weight that is not finite would hide differences.
    assert all(p.isfinite().all() for p in plain)
    assert_same([p.detach() for p in weights], [p.detach() for p in plain], where="weights")
    assert_same([p.grad for p in weights], [p.grad for p in plain], where="gradients")
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict(), where="state")
    return optimizer


def assert_same_training(
    factory: Factory,
    *,
    make: Callable[[], list[nn.Parameter]] = parameters_of,
    fuse: Callable[[Factory], Factory] = fused,
    steps: int = 24,
    **options: Any,
) -> Any:
    """Train two groups both ways, see `train` for the options; returns the fused optimizer."""

    def run(kind: Factory) -> tuple[Sequence[Tensor], Any]:
        parameters = make()
        optimizer = kind(two_groups(parameters, lr=0.02))
        train(optimizer, parameters, range(steps), **options)
        return parameters, optimizer

    return assert_same_both_ways(factory, run, fuse=fuse)
