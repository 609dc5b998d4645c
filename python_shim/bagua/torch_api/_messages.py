# SPDX-License-Identifier: Apache-2.0
"""Broadcast, and the barrier.

`comm` and errors: see `bagua.torch_api.communication`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bagua._torch_private import device_types
from bagua.torch_api._checks import Checks
from bagua.torch_api._collective import collective
from bagua.torch_api._communicators import Comm


@collective("broadcast")
def broadcast(checks: Checks, tensor: Tensor, root: int = 0, comm: Comm = None, *, src: int | None = None) -> None:
    """Give all ranks the `tensor` of rank `root`.

    Args:
        tensor: what is sent on rank `root`, overwritten elsewhere; the same number of elements and dtype everywhere.
        root: a rank of the communicator.
        comm: a communicator; by default all ranks of the default group.
        src: another name of `root`, as from version 0.7 of the original.
    """
    tensor = checks.tensor("tensor", tensor)
    if src is not None:
        if root not in (0, src):
            raise ValueError(f"{checks.where}: root and src mean the same rank, got root={root} and src={src}")
        root = src
    root = checks.peer("root", root)
    dist.broadcast(tensor, group=checks.group, group_src=root)


@collective("barrier")
def barrier(checks: Checks, comm: Comm = None) -> None:
    """Return when all ranks have called and, on each, what its current CUDA stream held before is done."""
    # The smallest reduction, as in the original. Where the group takes CPU tensors, NCCL need not be woken for it.
    devices = device_types(checks.group)
    is_on_cuda = bool(devices) and torch.device("cpu") not in devices
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_cuda else "cpu"
    tensor = checks.tensor("tensor", torch.zeros(1, device=device))
    if not is_on_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
    dist.all_reduce(tensor, group=checks.group)
