# SPDX-License-Identifier: Apache-2.0
"""Test data that every rank can compute for every other, and comparison with what should have come of it.

Values are whole numbers from 0 to 3, so that sums over ranks are exact in every dtype, in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# As many elements at a time, so that large tensors need little besides themselves.
_PIECE = 1 << 20


def values(rank: int, start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` of a rank's data, as int64: the same anywhere, different for each rank."""
    index = torch.arange(start, stop)
    return (index * 0x9E3779B1 + (rank + 1) * 0x85EBCA6B) >> 11 & 3


def sums(ranks: int, start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` of the sum of all ranks' data."""
    return sum((values(rank, start, stop) for rank in range(ranks)), torch.zeros(stop - start, dtype=torch.int64))


def fill(tensor: Tensor, rank: int) -> None:
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _PIECE):
        stop = min(start + _PIECE, flat.numel())
        flat[start:stop].copy_(values(rank, start, stop))


def difference(tensor: Tensor, expected: Callable[[int, int], Tensor]) -> str:
    """Return "" where a tensor holds `expected(start, stop)` everywhere, else what is wrong first."""
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _PIECE):
        stop = min(start + _PIECE, flat.numel())
        want = expected(start, stop).to(flat.dtype)
        got = flat[start:stop].cpu()
        wrong = (got != want).nonzero()
        if len(wrong):
            first = int(wrong[0])
            return f"element {start + first} is {got[first].item()} instead of {want[first].item()}"
    return ""
