# SPDX-License-Identifier: Apache-2.0
"""Optimizers that share their work with an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class QAdamOptimizer(Optimizer):
    """Adam whose variance is frozen after warm-up, for algorithm "qadam".

    In step k (from 1): while k < warmup_steps, m and v are updated by the gradient as in Adam, to the bit. In step
    warmup_steps both rest. From then on v is frozen and m is what the algorithm made of it, in the place of the gradient:
    the mean over the ranks of `beta1 m + (1 - beta1) g`. Where no algorithm does that, m is updated here. Always:
    `p -= lr / (1 - beta1^k) m / (sqrt(v) / sqrt(1 - beta2^k) + eps)`.

    Weight decay is added to the gradient, as in Adam; it thus acts during warm-up only (as in the original Bagua).
    A GradScaler is refused: momenta of several loss scales cannot be added. bfloat16 needs none.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        warmup_steps: the first step that does not update the variance, at least 1.
        betas: how much of the momentum and of the variance is kept in a step.
        eps: added to the denominator.
        weight_decay: factor of the weights that is added to the gradient.
    """

    # Has GradScaler hand its scale to step(), which refuses it, instead of changing the gradients unseen.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _check("learning rate", lr, lr >= 0)
        _check("eps", eps, eps >= 0)
        _check("betas[0]", betas[0], 0 <= betas[0] < 1)
        _check("betas[1]", betas[1], 0 <= betas[1] < 1)
        _check("weight_decay", weight_decay, weight_decay >= 0)
        _check("warmup_steps", warmup_steps, warmup_steps > 0)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.warmup_steps = warmup_steps
        # Parameters whose gradient will be a momentum in the step to come.
        self._handed_out: set[Tensor] = set()
        for group in self.param_groups:
            for p in group["params"]:
                self._state_of(p)

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    @property
    def steps_done(self) -> int:
        """Steps so far; of the parameter that has taken most of them."""
        return max(int(self._state_of(p)["step"]) for group in self.param_groups for p in group["params"])

    def momenta(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, float]]:
        """For the algorithm: what it has to add the gradients of the coming backward to, and the factor of decay.

        Returns:
            (momentum, beta1) for each of `parameters`; nothing while the optimizer warms up.
        """
        if self.steps_done < self.warmup_steps:
            return []
        beta1_of = {p: float(group["betas"][0]) for group in self.param_groups for p in group["params"]}
        momenta = [(self._momentum_before_backward(p), beta1_of[p]) for p in parameters]
        self._handed_out.update(parameters)
        return momenta

    def _momentum_before_backward(self, p: Tensor) -> Tensor:
        momentum: Tensor = self._state_of(p)["exp_avg"]
        # A second backward before the step (gradient accumulation without no_sync) finds the momentum of the first in
        # the gradient, adds to it, and has to go on from there: b m + (1 - b)(m + g) = m + (1 - b) g.
        if p in self._handed_out and p.grad is not None and bool(p.grad.any()) and bool(p.grad.isfinite().all()):
            return p.grad.detach().clone()
        return momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; returns what the closure, if any, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "QAdamOptimizer cannot be used with a GradScaler, for its momentum would mix loss scales: train in "
                "bfloat16, which needs none"
            )
        number = self.steps_done + 1
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError("QAdamOptimizer takes dense gradients only")
            self._step_group(group, parameters, number)
        self._handed_out.clear()
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor], number: int) -> None:
        if not parameters:
            return
        beta1, beta2 = group["betas"]
        states = [self._state_of(p) for p in parameters]
        for state in states:
            state["step"] += 1
        momenta = [state["exp_avg"] for state in states]
        variances = [state["exp_avg_sq"] for state in states]
        if number < self.warmup_steps:
            gradients = [_gradient(p) for p in parameters]
            if group["weight_decay"] != 0:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
            torch._foreach_lerp_(momenta, gradients, 1 - beta1)
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
        elif number > self.warmup_steps:
            for p, momentum in zip(parameters, momenta, strict=True):
                if p in self._handed_out:
                    momentum.copy_(_gradient(p))
                else:
                    momentum.lerp_(_gradient(p), 1 - beta1)
        # The order of these operations is torch's, for the same bits.
        denominators = list(torch._foreach_sqrt(variances))
        torch._foreach_div_(denominators, [(1 - beta2 ** state["step"]) ** 0.5 for state in states])
        torch._foreach_add_(denominators, group["eps"])
        sizes = [-(group["lr"] / (1 - beta1 ** state["step"])) for state in states]
        torch._foreach_addcdiv_(parameters, momenta, denominators, sizes)


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _check(name: str, value: float, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"invalid {name} of QAdamOptimizer: {value}")
