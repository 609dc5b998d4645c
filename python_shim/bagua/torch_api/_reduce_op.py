# SPDX-License-Identifier: Apache-2.0
"""The reduce operations under the numbers of the original, and their translation to torch's."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch.distributed as dist


class ReduceOp(IntEnum):
    """Element-wise reductions, with the original's values (which are those of its communication library).

    >>> int(ReduceOp.AVG)
    10
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def to_torch(op: Any, where: str) -> Any:
    """Return torch's reduce operation for `op`: a `ReduceOp`, its number, or already one of torch's.

    Anything else is a ValueError, whose message begins with `where`.
    """
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return op
    # A bool is an int, and True would be PRODUCT: `allreduce(tensor, True)` meant "average" in version 0.5.
    if isinstance(op, int) and not isinstance(op, bool) and op in list(ReduceOp):
        return getattr(dist.ReduceOp, ReduceOp(op).name)
    names = ", ".join(f"{one.name} ({one.value})" for one in ReduceOp)
    raise ValueError(
        f"{where}: op must be a bagua.torch_api.ReduceOp ({names}) or a torch.distributed.ReduceOp, got {op!r}"
    )
