# SPDX-License-Identifier: Apache-2.0
"""What tests of torch_api begin with, and compare by."""

from collections.abc import Sequence

import bagua.torch_api as api
import torch
import torch.distributed as dist
from reference import values
from torch import Tensor


def started() -> tuple[int, int]:
    """Rank and number of ranks; ranks are shared with other tests, which may have initialised before."""
    if not api.is_initialized():
        api.init_process_group()
    return dist.get_rank(), dist.get_world_size()


def from_all(dtype: torch.dtype, shape: Sequence[int], op: str = "SUM") -> list[Tensor]:
    return [values(dtype, shape, rank, op) for rank in range(dist.get_world_size())]


def exactly(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)
