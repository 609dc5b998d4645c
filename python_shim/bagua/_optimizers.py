# SPDX-License-Identifier: Apache-2.0
"""Optimizers that share their work with an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from bagua._native import _C
from bagua._torch_private import (
    foreach_add,
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)

# Those of torch that treat each number of a parameter by itself. A class derived from them may do anything.
ELEMENTWISE = {Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD}
# Elements. On the CPU a chain of element-wise operations is bound by memory: block by block, what one writes the next
# finds in a cache. A step of 10.6 million parameters takes 22 to 37 ms without it, as the memory of temporaries is at
# hand or not, and 17 with it.
_BLOCK = 1 << 18


class QAdamOptimizer(Optimizer):
    """Adam whose variance is frozen after warm-up, for algorithm "qadam".

    In step k (from 1): while k < warmup_steps, m and v are updated by the gradient as in Adam, to the bit. In step
    warmup_steps both rest. From then on v is frozen and m is what the algorithm made of it, in the place of the
    gradient: the mean over the ranks of `beta1 m + (1 - beta1) g`. Where no algorithm does that, m is updated here.
    Always:
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
    # Whether the last forward was one whose backward is synchronised; of the step at hand.
    _was_synchronised = False

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
        if warmup_steps == 1:
            warnings.warn(
                "QAdamOptimizer with warmup_steps=1 never sees a variance and divides by eps: use 2 at least, better "
                "15 % of all steps",
                stacklevel=2,
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
        super().__init__(params, defaults)
        if any(p.is_complex() for group in self.param_groups for p in group["params"]):
            raise ValueError("QAdamOptimizer does not take complex parameters")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("warmup_steps", self.defaults["warmup_steps"])
        self._handed_out.clear()

    @property
    def warmup_steps(self) -> int:
        """The first step that does not update the variance."""
        steps: int = self.param_groups[0]["warmup_steps"]
        return steps

    @property
    def _handed_out(self) -> dict[Tensor, Tensor]:
        """For parameters whose gradient will be a momentum in the step to come: what the momentum starts from."""
        handed_out: dict[Tensor, Tensor] = self.__dict__.setdefault("_bagua_handed_out", {})
        return handed_out

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    def _steps_of(self, p: Tensor) -> int:
        return int(self._state_of(p)["step"])

    @property
    def steps_done(self) -> int:
        """Steps so far; of the parameter that has taken most of them."""
        return max(self._steps_of(p) for group in self.param_groups for p in group["params"])

    def momenta(self, parameters: Sequence[Tensor], *, is_synchronised: bool = True) -> list[tuple[Tensor, float]]:
        """For the algorithm, before a forward: what the gradients of its backward are to be added to.

        These are (momentum, beta1) for each of `parameters`, or nothing while the optimizer warms up, or where the
        backward is not synchronised. A parameter that came late, and warms up by itself, has (zeros, 0): its gradient
        stays one.
        """
        self._note_accumulation()
        self._was_synchronised = is_synchronised
        if not is_synchronised or self.steps_done < self.warmup_steps:
            return []
        beta1_of = {p: float(group["betas"][0]) for group in self.param_groups for p in group["params"]}
        momenta = []
        for p in parameters:
            if self._steps_of(p) < self.warmup_steps:
                momenta.append((torch.zeros_like(p), 0.0))
                continue
            start = self._handed_out.setdefault(p, self._state_of(p)["exp_avg"])
            momenta.append((start, beta1_of[p]))
        return momenta

    def _note_accumulation(self) -> None:
        # A synchronised backward since the last step has left a momentum in the gradient. The next one, of gradient
        # accumulation, adds to it and has to go on from there: b m + (1 - b)(m + g) = m + (1 - b) g. It is noted before
        # any other gradient is added. One that is not finite is to be skipped, not gone on from.
        if not self._was_synchronised:
            return
        for p in self._handed_out:
            has_momentum = p.grad is not None and bool(p.grad.any()) and bool(p.grad.isfinite().all())
            self._handed_out[p] = _gradient(p).detach().clone() if has_momentum else self._state_of(p)["exp_avg"]

    @torch.no_grad()
    def take_momenta_back(self, parameters: Sequence[Tensor], *, is_before_step: bool) -> None:
        """For the algorithm that leaves: from here on gradients are gradients, also those of the step at hand.

        `is_before_step`: a synchronised backward has come since the last step.
        """
        beta1_of = {p: float(group["betas"][0]) for group in self.param_groups for p in group["params"]}
        for p in [p for p in parameters if p in self._handed_out]:
            start, momentum = self._handed_out.pop(p), self._state_of(p)["exp_avg"]
            holds_momentum = is_before_step or start is not momentum
            if p.grad is not None and holds_momentum and bool(p.grad.any()):
                # What leads from the momentum of the last step to this one.
                p.grad.sub_(momentum, alpha=beta1_of[p]).div_(1 - beta1_of[p])
        if not self._handed_out:
            self._was_synchronised = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Gradients that were accumulated for a step that is not taken leave no trace."""
        for p, start in self._handed_out.items():
            momentum = self._state_of(p)["exp_avg"]
            if start is not momentum:
                start.copy_(momentum)  # the algorithm may hold it already
        super().zero_grad(set_to_none)

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
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(_gradient(p).is_sparse for p in parameters):
                raise RuntimeError("QAdamOptimizer takes dense gradients only")
            if parameters:
                self._update_moments(group, parameters)
                self._update_parameters(group, parameters)
        self._handed_out.clear()
        self._was_synchronised = False
        return loss

    def _update_moments(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        warming_up: list[Tensor] = []
        moved: list[Tensor] = []
        for p in parameters:
            state = self._state_of(p)
            state["step"] = int(state["step"]) + 1
            if state["step"] < self.warmup_steps:
                warming_up.append(p)
            elif state["step"] > self.warmup_steps and p not in self._handed_out:
                moved.append(p)
        # Of many parameters at once: on a GPU a kernel for each takes longer to start than to run.
        if moved:
            gradients = [_gradient(p) for p in moved]
            foreach_lerp_([self.state[p]["exp_avg"] for p in moved], gradients, 1 - beta1)
        if not warming_up:
            return
        gradients = [_gradient(p) for p in warming_up]
        momenta = [self.state[p]["exp_avg"] for p in warming_up]
        variances = [self.state[p]["exp_avg_sq"] for p in warming_up]
        if group["weight_decay"] != 0:
            gradients = list(foreach_add(gradients, warming_up, alpha=group["weight_decay"]))
        foreach_lerp_(momenta, gradients, 1 - beta1)
        foreach_mul_(variances, beta2)
        foreach_addcmul_(variances, gradients, gradients, 1 - beta2)

    def _update_parameters(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        together = []
        for p in parameters:
            state = self._state_of(p)
            tensors = (p, state["exp_avg"], state["exp_avg_sq"], _gradient(p))
            is_replaced = p in self._handed_out
            if is_replaced and _C.adam_takes(tensors):
                _C.adam_step(*tensors, *_scales(group, state["step"]), group["eps"])
            elif _have_blocks(*tensors):
                size, correction = _scales(group, state["step"])
                for weights, momentum, variance, gradient in _blocks(*tensors):
                    if is_replaced:
                        momentum.copy_(gradient)
                    # The order of these operations is torch's, for the same bits.
                    weights.addcdiv_(momentum, variance.sqrt().div_(correction).add_(group["eps"]), value=size)
            else:
                together.append(p)
        if not together:
            return
        replaced = [p for p in together if p in self._handed_out]
        if replaced:
            foreach_copy_([self.state[p]["exp_avg"] for p in replaced], [_gradient(p) for p in replaced])
        sizes, corrections = zip(*(_scales(group, self._steps_of(p)) for p in together), strict=True)
        denominators = list(foreach_sqrt([self.state[p]["exp_avg_sq"] for p in together]))
        foreach_div_(denominators, corrections)
        foreach_add_(denominators, group["eps"])
        foreach_addcdiv_(together, [self.state[p]["exp_avg"] for p in together], denominators, sizes)


def _scales(group: dict[str, Any], step: int) -> tuple[float, float]:
    """Return the factor of the momentum over the denominator, and what divides the root of the variance."""
    beta1, beta2 = group["betas"]
    return -(float(group["lr"]) / (1 - beta1**step)), (1 - beta2**step) ** 0.5


def _have_blocks(*tensors: Tensor) -> bool:
    return all(t.numel() > _BLOCK and t.is_contiguous() and _C.works_on_cpu(t) for t in tensors)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same elements of each, block by block."""
    return zip(*(torch.split(tensor.detach().view(-1), _BLOCK) for tensor in tensors), strict=True)


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _check(name: str, value: float, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"invalid {name} of QAdamOptimizer: {value}")
