# SPDX-License-Identifier: Apache-2.0
"""QAdamOptimizer by itself: large weights, which it updates block by block."""

from types import SimpleNamespace
from typing import Any

import bagua
import pytest
import torch
from bagua import _optimizers
from bagua._native import _C
from torch import Tensor, nn

STEPS = 5
WARMUP = 3
LARGE = _optimizers._BLOCK * 2 + 17


def _weights(numel: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(1)))


def _gradient(numel: int, step: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 + step))


def _steps(p: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        p.grad = _gradient(p.numel(), step).to(p.dtype).as_strided(p.size(), p.stride())
        optimizer.step()


def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks, whole = _weights(LARGE), _weights(LARGE)
    _steps(in_blocks, bagua.QAdamOptimizer([in_blocks], lr=1e-3, warmup_steps=WARMUP), STEPS)
    monkeypatch.setattr(_optimizers, "_BLOCK", LARGE)
    _steps(whole, bagua.QAdamOptimizer([whole], lr=1e-3, warmup_steps=WARMUP), STEPS)
    assert torch.equal(in_blocks, whole)
    assert not torch.equal(whole, _weights(LARGE))


def test_large_weights_that_are_not_contiguous_are_updated_too() -> None:
    flat = _weights(LARGE // 2 * 2)
    transposed = nn.Parameter(flat.detach().view(2, -1).clone().t())
    _steps(flat, bagua.QAdamOptimizer([flat], lr=1e-3, warmup_steps=WARMUP), STEPS)
    _steps(transposed, bagua.QAdamOptimizer([transposed], lr=1e-3, warmup_steps=WARMUP), STEPS)
    assert torch.equal(transposed.detach().t().reshape(-1), flat.detach())


def _steps_with_momenta(p: nn.Parameter, optimizer: bagua.QAdamOptimizer, steps: int) -> None:
    """As with the algorithm on a single rank: the gradient becomes the momentum to which it leads."""
    for step in range(steps):
        handed_out = optimizer.momenta([p])
        gradient = _gradient(p.numel(), step).to(p.dtype)
        if handed_out:
            momentum, beta1 = handed_out[0]
            gradient.mul_(1 - beta1).add_(momentum, alpha=beta1)
        p.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("numel", [5, LARGE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10), (torch.bfloat16, 0.2)])
def test_momenta_of_the_algorithm_lead_to_the_steps_of_own_ones(
    numel: int, dtype: torch.dtype, tolerance: float
) -> None:
    start = torch.zeros(numel, dtype=dtype)  # steps are not lost in roundings of larger weights
    given, own = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    _steps_with_momenta(given, bagua.QAdamOptimizer([given], lr=1e-2, warmup_steps=WARMUP), STEPS)
    _steps(own, bagua.QAdamOptimizer([own], lr=1e-2, warmup_steps=WARMUP), STEPS)
    assert own.all()
    assert (given - own).abs().mean() <= tolerance * own.abs().mean()


@pytest.mark.parametrize(
    ("dtype", "is_native"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)]
)
def test_steps_with_momenta_go_over_memory_once(
    dtype: torch.dtype, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor] = []

    def adam_step(weights: Tensor, *others: Any) -> None:
        taken.append(weights)
        _C.adam_step(weights, *others)

    monkeypatch.setattr(_optimizers, "_C", SimpleNamespace(adam_takes=_C.adam_takes, adam_step=adam_step))
    p = nn.Parameter(_weights(5).detach().to(dtype))
    _steps_with_momenta(p, bagua.QAdamOptimizer([p], warmup_steps=WARMUP), STEPS)
    assert [weights is p for weights in taken] == [True] * (STEPS - WARMUP if is_native else 0)


@pytest.mark.parametrize(
    "moment", ["before the backward", "after it", "in accumulation", "after a step that was skipped"]
)
def test_momenta_that_are_taken_back_leave_gradients(moment: str) -> None:
    """As if the algorithm had never been: the step at hand, whatever lies in the gradient, and those to come."""
    p, alone = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
    optimizer = bagua.QAdamOptimizer([p], lr=1e-2, warmup_steps=WARMUP)
    expected = bagua.QAdamOptimizer([alone], lr=1e-2, warmup_steps=WARMUP)
    _steps_with_momenta(p, optimizer, STEPS)
    _steps(alone, expected, STEPS)
    first, second = _gradient(5, 11), _gradient(5, 12)
    optimizer.zero_grad(set_to_none=False)
    (momentum, beta1) = optimizer.momenta([p])[0]
    assert p.grad is not None
    if moment != "before the backward":
        p.grad.copy_(beta1 * momentum + (1 - beta1) * first)
    if moment == "after a step that was skipped":
        optimizer.zero_grad(set_to_none=False)
    if moment == "in accumulation":
        optimizer.momenta([p])
    is_before_step = moment in ("after it", "after a step that was skipped")
    optimizer.take_momenta_back([p], is_before_step=is_before_step)
    if moment != "after it":
        p.grad.add_(second)
    alone.grad = {"after it": first, "in accumulation": first + second}.get(moment, second).clone()
    for each in (optimizer, expected):
        each.step()
    torch.testing.assert_close(p, alone, rtol=1e-4, atol=1e-6)
    _steps(p, optimizer, STEPS)
    _steps(alone, expected, STEPS)
    torch.testing.assert_close(p, alone, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_dropped_after_the_next_forward_leave_no_trace_in_what_the_algorithm_holds() -> None:
    p = nn.Parameter(torch.zeros(5))
    optimizer = bagua.QAdamOptimizer([p], lr=1e-2, warmup_steps=WARMUP)
    _steps_with_momenta(p, optimizer, STEPS)
    momentum = optimizer.state[p]["exp_avg"].clone()
    ((start, beta1),) = optimizer.momenta([p])
    left = beta1 * start + (1 - beta1) * _gradient(5, 11)
    p.grad = left
    # The step is not taken: the next forward goes on from what it has left, as in accumulation.
    ((start, _),) = optimizer.momenta([p])
    assert torch.equal(start, left)
    assert not torch.equal(start, momentum)
    optimizer.zero_grad()
    assert torch.equal(start, momentum)
