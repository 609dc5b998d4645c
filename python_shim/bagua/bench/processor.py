# SPDX-License-Identifier: Apache-2.0
"""How long this processor takes for what a step's communication asks of it, beside the one that the prices are of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from bagua._native import _C

_SECONDS = 0.25
_ELEMENTS = 1 << 20
_WIDTH = 256
# Microseconds on one core of the processor of benchmarks/results/grid.json. They were measured on another, divided by
# 2.35: one step without communication took 82 ms on the former, and 194 ms of the latter's processor time.
_MICROSECONDS = {"int8": 177, "sum": 54, "copy": 56, "product": 163}


def _measured() -> dict[str, float]:
    """Return the least microseconds of each on one core, the codec's, a sum's, a copy's and a product of matrices'."""
    one, other = torch.randn(_ELEMENTS), torch.randn(_ELEMENTS)
    factor, product = torch.randn(_WIDTH, _WIDTH), torch.empty(_WIDTH, _WIDTH)
    works: dict[str, Callable[[], object]] = {
        "int8": lambda: _C.code_and_decode("int8", one),
        "sum": lambda: other.add_(one),
        "copy": lambda: other.copy_(one),
        "product": lambda: torch.mm(factor, factor, out=product),
    }
    least = dict.fromkeys(works, math.inf)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    end = time.perf_counter() + _SECONDS * len(works)
    while time.perf_counter() < end:
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            least[name] = min(least[name], 1e6 * (time.perf_counter() - begin))
    torch.set_num_threads(threads)
    return least


def slowness() -> float:
    """Return how many times as long as the processor of the prices this one takes, as the mean of the four."""
    measured = _measured()
    return math.exp(sum(math.log(measured[name] / _MICROSECONDS[name]) for name in measured) / len(measured))
