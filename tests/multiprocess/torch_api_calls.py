# SPDX-License-Identifier: Apache-2.0
"""What tests of torch_api begin with, and compare by."""

from collections.abc import Sequence
from typing import Any

import bagua.torch_api as api
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from reference import values
from torch import Tensor, nn


def started() -> tuple[int, int]:
    """Rank and number of ranks; ranks are shared with other tests, which may have initialised before."""
    if not api.is_initialized():
        api.init_process_group()
    return dist.get_rank(), dist.get_world_size()


def wrapped(model: nn.Module, algorithm: str | Algorithm = "gradient_allreduce", **options: Any) -> torch.optim.SGD:
    """Wrap a model with an algorithm, or with one of that name; returns the optimizer that trains it."""
    started()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    made = Algorithm.init(algorithm, **options) if isinstance(algorithm, str) else algorithm
    model.with_bagua([optimizer], made)  # type: ignore[operator]
    return optimizer


def from_all(dtype: torch.dtype, shape: Sequence[int], op: str = "SUM") -> list[Tensor]:
    return [values(dtype, shape, rank, op) for rank in range(dist.get_world_size())]


def exactly(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)
