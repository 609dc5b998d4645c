# SPDX-License-Identifier: Apache-2.0
"""Optimizers that fuse_optimizer() does not know: derived from torch's, and of other packages."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from bagua.torch_api.contrib import fuse_optimizer
from fused_training import assert_same_training, backward, parameters_of
from torch import nn, optim


class _Logged(optim.AdamW):
    """As most derived classes are: around the step of their base."""

    def __init__(self, params: Any, name: str = "", **options: Any) -> None:
        super().__init__(params, **options)
        self.name = name
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.steps.append(len(self.steps))
        return super().step(closure)


class _Renamed(optim.SGD):
    pass


class _Lion(optim.Optimizer):
    """As in packages of optimizers, and without a word about its elements."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["exp_avg"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


@pytest.mark.parametrize(
    "factory",
    [partial(_Logged, lr=0.05), partial(_Renamed, lr=0.05, momentum=0.9), _Lion],
    ids=["around", "empty", "new"],
)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_an_optimizer_that_passes_the_trial_is_fused(factory: Any, set_to_none: bool) -> None:
    optimizer = assert_same_training(factory, set_to_none=set_to_none)
    assert optimizer._bagua_fused_count == 24 * 2


def test_the_trial_changes_nothing() -> None:
    parameters = parameters_of()
    optimizer = _Logged(parameters, lr=0.05)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append("before"))
    backward(parameters, 0)
    optimizer.step()
    taken = len(calls)
    weights = [p.detach().clone() for p in parameters]
    state, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    fuse_optimizer(optimizer)
    assert all(map(torch.equal, weights, parameters))
    assert torch.equal(random, torch.get_rng_state())
    assert str(optimizer.state_dict()) == str(state)
    assert (optimizer.steps, len(calls)) == ([0], taken)


class _ClippedByNorm(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(min(1.0, 5.0 / p.grad.norm().item()))
        return super().step(closure)


class _MatricesOnly(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.dim() > 1:
                        p.mul_(0.99)
        return super().step(closure)


class _ByAngle(optim.SGD):
    """What AdamP does: only where gradient and weights are nearly orthogonal."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if torch.nn.functional.cosine_similarity(p.grad.flatten(), p.detach().flatten(), 0).abs() < 1e-4:
                    p.grad.div_(p.detach().norm())
        return super().step(closure)


class _Trembling(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn(p.shape[:1]).mean())
        return super().step(closure)


@pytest.mark.parametrize("kind", [_ClippedByNorm, _MatricesOnly, _ByAngle, _Trembling])
def test_an_optimizer_whose_weights_would_differ_is_refused(kind: Any) -> None:
    message = rf"cannot fuse {kind.__name__}: it gave other weights .* `bagua_elementwise = True`"
    with pytest.raises(TypeError, match=message):
        fuse_optimizer(kind([nn.Parameter(torch.ones(2, 2))], lr=0.1))


class _NeedsClosure(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure) + closure()


class _Lookahead(optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]


class _Counts(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sums"] = torch.zeros(2, 2)
        return super().step(closure)


class _Refuses(optim.SGD):
    bagua_elementwise = False


class _LAMB(optim.SGD):
    pass


_LAMB.__name__ = "LAMB"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_NeedsClosure, "could not be tried on small parameters .TypeError"),
        (_Lookahead, "keeps tensors or modules outside of its state, in 'slow'"),
        (_Counts, "keeps a state 'sums' that is neither a number nor of the shape"),
        (_Refuses, "its class says `bagua_elementwise = False`"),
        (_LAMB, "scales an update by norms of the parameter"),
    ],
)
def test_an_optimizer_that_cannot_be_fused_is_named_with_the_reason(kind: Any, reason: str) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with pytest.raises(TypeError, match=rf"cannot fuse {kind.__name__}: .*{reason}"):
        fuse_optimizer(optimizer)


ELSEWHERE = ["torch_optimizer.AdaBelief", "torch_optimizer.DiffGrad", "torch_optimizer.Yogi", "pytorch_optimizer.Lion"]


@pytest.mark.long
@pytest.mark.parametrize("name", ELSEWHERE)
def test_optimizers_of_other_packages_are_fused(name: str) -> None:
    package, kind = name.split(".")
    module = pytest.importorskip(package, reason=f"{package} is not installed: make test-engines")
    optimizer = assert_same_training(partial(getattr(module, kind), lr=0.01))
    assert optimizer._bagua_fused_count == 24 * 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch_optimizer.Lamb", "torch_optimizer.AdamP", "pytorch_optimizer.Shampoo"])
def test_optimizers_of_other_packages_that_cannot_be_fused_are_refused(name: str) -> None:
    package, kind = name.split(".")
    module = pytest.importorskip(package, reason=f"{package} is not installed: make test-engines")
    with pytest.raises(TypeError, match=f"cannot fuse {kind}: "):
        fuse_optimizer(getattr(module, kind)([nn.Parameter(torch.ones(2, 2))], lr=0.01))
