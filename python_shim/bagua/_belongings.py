# SPDX-License-Identifier: Apache-2.0
"""What a model of its own has on every rank, when the ranks are to be made equal."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bagua._torch_private import local_part


class Belongings:
    """An optimizer's state and the gradients that it has not taken yet, as tensors that the ranks can exchange.

    Tensors are those of the optimizer itself where they are on the parameters' device. For numbers, and tensors that
    are elsewhere (Adam counts its steps on the CPU), there are others, which `write_back` copies. Of DTensors they
    are this rank's parts. Parameters in `without` are left alone, as those of another model that the optimizer trains.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        parameters: Sequence[Tensor],
        *,
        is_before_step: bool,
        without: Container[Tensor] = (),
    ) -> None:
        self.state: list[Tensor] = []
        self._elsewhere: list[tuple[Tensor, Tensor]] = []
        self._numbers: list[tuple[dict[Any, Any], Any]] = []
        self._shapes: list[str] = []
        self._device = parameters[0].device
        self.gradients = [local_part(p.grad) for p in parameters if p.grad is not None] if is_before_step else []
        # Where ranks are told apart: what is exchanged has to be the same on all.
        self.moment = "between a backward and its step" if self.gradients else "between two steps"
        if self.gradients:
            self._shapes += ["gradients", *("none" if p.grad is None else str(p.grad.layout) for p in parameters)]
        if optimizer is not None:
            self._add_state(optimizer, without)
        self._packed = torch.tensor(
            [float(state[key]) for state, key in self._numbers], dtype=torch.float64, device=self._device
        )
        if self._numbers:
            self.state.append(self._packed)
        self.shapes = "; ".join(self._shapes)

    def _add_state(self, optimizer: Optimizer, without: Container[Tensor]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p not in without]
        for index, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter) or {}
            for key in sorted(state, key=str):
                self._add(f"{index}.{key}", state, key)

    def _add(self, name: str, state: dict[Any, Any], key: Any) -> None:
        value = state[key]
        if isinstance(value, Tensor):
            value = local_part(value)
            self._shapes.append(f"{name}: {value.dtype}{list(value.shape)}")
            here = value.to(self._device)
            self.state.append(here)
            if here is not value:
                self._elsewhere.append((value, here))
        else:
            self._shapes.append(f"{name}: {type(value).__name__}")
            if isinstance(value, (bool, int, float)):
                self._numbers.append((state, key))

    @torch.no_grad()
    def write_back(self) -> None:
        """Take what has been exchanged for tensors and numbers that could not be exchanged themselves."""
        for value, here in self._elsewhere:
            value.copy_(here)
        for (state, key), number in zip(self._numbers, self._packed.tolist(), strict=True):
            state[key] = type(state[key])(number)
