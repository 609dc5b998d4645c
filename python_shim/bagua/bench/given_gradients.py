# SPDX-License-Identifier: Apache-2.0
"""A module with the parameters of a model, whose gradients are given instead of computed, after as long a time."""
# No `from __future__ import annotations`: see hooks.py.

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua._message_bytes import Parameter
from bagua.bench.cost_model import FORWARD, OPTIMIZER, backward_shares


class _Given(torch.autograd.Function):
    """Passes a loss on. The gradient of its weight is known, and there after some seconds."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.seconds = seconds
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        time.sleep(ctx.seconds)
        return outer[0], ctx.saved_tensors[0], None, None


def _layer(parameter: Parameter, weight: Tensor) -> nn.Module:
    """Return a module by whose type an algorithm sees the parameter's role."""
    layer: nn.Module = nn.Module()
    if parameter.role == "embedding":
        layer = nn.Embedding(1, 1)
    elif parameter.role == "head":
        layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


class GivenGradients(nn.Module):
    """Parameters of these shapes with these weights.

    Args:
        parameters: in the model's order; gradients come from the last one to the first.
        weights: all of them, one after another.
        compute: seconds of a step's arithmetic, in which this sleeps. The optimizer's part of it is left to the caller.
    """

    def __init__(self, parameters: Sequence[Parameter], weights: Tensor, compute: float) -> None:
        super().__init__()
        self._elements = [parameter.elements for parameter in parameters]
        self._forward_seconds = compute * FORWARD
        backward = compute * (1 - FORWARD - OPTIMIZER)
        self._backward_seconds = [backward * share for share in backward_shares(parameters)]
        layers: list[nn.Module] = []
        for parameter, part in zip(parameters, torch.split(weights, self._elements), strict=True):
            weight = part.reshape(parameter.shape).clone()
            if layers and isinstance(layers[-1], nn.Linear) and parameter.role == "head":
                layers[-1].bias = nn.Parameter(weight)
            else:
                layers.append(_layer(parameter, weight))
        self._layers = nn.ModuleList(layers)

    def forward(self, gradients: Tensor) -> Tensor:
        """Return a loss with these gradients, one after another as the weights are."""
        time.sleep(self._forward_seconds)
        loss = gradients.new_zeros(())
        parts = zip(self.parameters(), torch.split(gradients, self._elements), self._backward_seconds, strict=True)
        for weight, gradient, seconds in parts:
            loss = _Given.apply(loss, weight, gradient.view_as(weight), seconds)
        return loss
