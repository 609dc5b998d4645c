# SPDX-License-Identifier: Apache-2.0
"""Several tensors in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TensorsAlike:
    """Tensors of one dtype and device, which travel as one flat tensor."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def join(self) -> Tensor:
        """Return all elements, tensor after tensor, each in row-major order."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])

    def take_from(self, flat: Tensor) -> None:
        """Write what `join` returned, or what came of it, back to the tensors."""
        pieces = torch.split(flat, [tensor.numel() for tensor in self.tensors])
        for tensor, piece in zip(self.tensors, pieces, strict=True):
            tensor.detach().copy_(piece.view(tensor.shape))


def flattened(tensors: Sequence[Tensor]) -> list[TensorsAlike]:
    """Group the tensors by dtype and device, in the order of the first tensor of each group."""
    groups: dict[tuple[torch.dtype, torch.device], TensorsAlike] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), TensorsAlike()).tensors.append(tensor)
    return list(groups.values())
