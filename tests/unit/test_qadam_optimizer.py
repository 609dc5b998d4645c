# SPDX-License-Identifier: Apache-2.0
"""QAdamOptimizer by itself: large weights, which it updates block by block."""

import bagua
import pytest
import torch
from bagua import optimizers
from torch import Tensor, nn

STEPS = 5
WARMUP = 3
LARGE = optimizers._BLOCK * 2 + 17


def _weights(numel: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(1)))


def _gradient(numel: int, step: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 + step))


def _steps(p: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        p.grad = _gradient(p.numel(), step).as_strided(p.size(), p.stride())
        optimizer.step()


def test_large_weights_take_the_steps_of_adam_to_the_bit_while_it_warms_up() -> None:
    ours, stock = _weights(LARGE), _weights(LARGE)
    _steps(ours, bagua.QAdamOptimizer([ours], lr=1e-3, warmup_steps=STEPS + 1), STEPS)
    _steps(stock, torch.optim.Adam([stock], lr=1e-3), STEPS)
    assert torch.equal(ours, stock)


def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks, whole = _weights(LARGE), _weights(LARGE)
    _steps(in_blocks, bagua.QAdamOptimizer([in_blocks], lr=1e-3, warmup_steps=WARMUP), STEPS)
    monkeypatch.setattr(optimizers, "_BLOCK", LARGE)
    _steps(whole, bagua.QAdamOptimizer([whole], lr=1e-3, warmup_steps=WARMUP), STEPS)
    assert torch.equal(in_blocks, whole)
    assert not torch.equal(whole, _weights(LARGE))


def test_large_weights_that_are_not_contiguous_are_updated_too() -> None:
    flat = _weights(LARGE // 2 * 2)
    transposed = nn.Parameter(flat.detach().view(2, -1).clone().t())
    _steps(flat, bagua.QAdamOptimizer([flat], lr=1e-3, warmup_steps=WARMUP), STEPS)
    _steps(transposed, bagua.QAdamOptimizer([transposed], lr=1e-3, warmup_steps=WARMUP), STEPS)
    assert torch.equal(transposed.detach().t().reshape(-1), flat.detach())
