# SPDX-License-Identifier: Apache-2.0
"""Makes all ranks start from rank 0's weights and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from bagua._tensors_apart import with_tensors, without_tensors


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors by those of the group's first rank. Collective."""
    for tensor in tensors:
        # Not every backend takes what is not contiguous, such as weights in channels_last.
        travelling = tensor.detach().contiguous()
        dist.broadcast(travelling, group=group, group_src=0)
        if travelling.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(travelling)


def broadcast_optimizer_state(optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Give an optimizer the state and hyper-parameters of the group's first rank. Collective.

    Raises:
        ValueError: the optimizer is LBFGS, whose state is not one of its parameters.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError("the state of LBFGS cannot be broadcast: use another optimizer")
    if group.size() == 1:
        return
    is_root = group.rank() == 0
    tensors: list[Tensor] = []
    # The state with a place in `tensors` for each tensor, and what it takes to make an empty one.
    message: list[Any] = [None]
    if is_root:
        skeleton = without_tensors(optimizer.state_dict(), tensors)
        message = [(skeleton, [(tuple(t.shape), t.dtype, t.device.type) for t in tensors])]
    dist.broadcast_object_list(message, group=group, group_src=0)
    skeleton, kinds = message[0]
    device = _device_of(optimizer)
    if not is_root:
        tensors = [
            torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else device) for shape, dtype, kind in kinds
        ]
    for i, tensor in enumerate(tensors):
        travelling = tensor.detach().to(device)
        broadcast_tensors([travelling], group)
        tensors[i] = travelling.to(tensor.device)
    if not is_root:
        optimizer.load_state_dict(with_tensors(skeleton, tensors))


def _device_of(optimizer: Optimizer) -> torch.device:
    device: torch.device = optimizer.param_groups[0]["params"][0].device
    return device
