# SPDX-License-Identifier: Apache-2.0
"""Several tensors in one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all elements of each dtype and device as one tensor; what the caller makes of it is written back to them.

    Tensor after tensor, each in row-major order; in the order of the first tensor of each dtype and device.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        yield flat
        for tensor, piece in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(piece.view(tensor.shape))
