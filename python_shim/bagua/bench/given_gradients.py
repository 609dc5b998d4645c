# SPDX-License-Identifier: Apache-2.0
"""A module with the parameters of a model, whose gradients are given instead of computed, after as long a time."""
# No `from __future__ import annotations`: see _hooks.py.

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua._message_bytes import Parameter
from bagua.bench.cost_model import FORWARD, OPTIMIZER, backward_shares


class _Arithmetic:
    """Time that passes as if a device computed: what else happens meanwhile takes none of its own."""

    def __init__(self) -> None:
        self._end = 0.0

    def begin(self) -> None:
        self._end = time.perf_counter()

    def take(self, seconds: float) -> None:
        if seconds:
            self._end += seconds
            time.sleep(max(0.0, self._end - time.perf_counter()))


class _Given(torch.autograd.Function):
    """Passes a loss on. The gradient of its weight is known, and there after some seconds."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, weight: Tensor, gradient: Tensor, arithmetic: _Arithmetic, seconds: float
    ) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.arithmetic, ctx.seconds = arithmetic, seconds
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        ctx.arithmetic.take(ctx.seconds)
        return outer[0], ctx.saved_tensors[0], None, None, None


_ROLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(1, 1),
    "head": lambda: nn.Linear(1, 1, bias=False),
}


def _put(root: nn.Module, parameter: Parameter, weight: nn.Parameter) -> None:
    """Give a module a parameter by its name, in a module by whose type an algorithm sees its role."""
    *path, name = parameter.name.split(".")
    if not path:
        path, name = [name], "weight"
    for index, part in enumerate(path):
        if part not in dict(root.named_children()):
            is_last = index == len(path) - 1
            layer = _ROLES.get(parameter.role, nn.Module)() if is_last else nn.Module()
            if is_last and parameter.role in _ROLES:
                # Only its type is wanted.
                layer.register_parameter("weight", None)
            root.add_module(part, layer)
        root = root.get_submodule(part)
    setattr(root, name, weight)


class GivenGradients(nn.Module):
    """Parameters of these names and shapes with these weights.

    Args:
        parameters: in the model's order; gradients come from the last one to the first.
        weights: all of them, one after another.
        compute: seconds of a step's arithmetic, in which this sleeps. The optimizer's part of it is left to the caller.
    """

    def __init__(self, parameters: Sequence[Parameter], weights: Tensor, compute: float) -> None:
        super().__init__()
        self._elements = [parameter.elements for parameter in parameters]
        self._arithmetic = _Arithmetic()
        self._forward_seconds = compute * FORWARD
        backward = compute * (1 - FORWARD - OPTIMIZER)
        self._backward_seconds = [backward * share for share in backward_shares(parameters)]
        parts = zip(parameters, torch.split(weights, self._elements), strict=True)
        self.given_weights = [nn.Parameter(part.reshape(parameter.shape).clone()) for parameter, part in parts]
        for parameter, weight in zip(parameters, self.given_weights, strict=True):
            _put(self, parameter, weight)

    def forward(self, gradients: Tensor) -> Tensor:
        """Return a loss with these gradients, one after another as the weights are."""
        self._arithmetic.begin()
        self._arithmetic.take(self._forward_seconds)
        loss = gradients.new_zeros(())
        parts = zip(self.given_weights, torch.split(gradients, self._elements), self._backward_seconds, strict=True)
        for weight, gradient, seconds in parts:
            loss = _Given.apply(loss, weight, gradient.view_as(weight), self._arithmetic, seconds)
        return loss
