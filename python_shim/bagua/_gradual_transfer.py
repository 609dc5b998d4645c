# SPDX-License-Identifier: Apache-2.0
"""Gives newcomers weights and optimizer state while all train: a part in each step, which later steps keep right.

An optimizer that treats each number by itself changes what has come as it does on the other ranks, as all have the same
gradients. It changes what has not come yet to no purpose. Newcomers give zeros to the mean of the gradients, and the
others so much more that it stays theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua._attachment import trainable_parameters, unwrapped

# torch's own that treat each number by itself; one derived from them may not.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Rprop,
)


def travels_later(ddp: DistributedDataParallel, optimizer: Optimizer) -> list[Tensor]:
    """Return what need not be there before a newcomer's first step, in the same order on all ranks that have it.

    Empty where all has to be there: of another optimizer, or of tensors that are not dense.
    """
    optimizer = unwrapped(optimizer)
    if type(optimizer) not in _ELEMENTWISE:
        return []
    parameters = trainable_parameters(ddp)
    tensors = [p.detach() for p in parameters]
    for p in parameters:
        state = optimizer.state.get(p, {})
        tensors += [
            state[key] for key in sorted(state) if isinstance(state[key], Tensor) and state[key].shape == p.shape
        ]
    tensors = [tensor for tensor in tensors if tensor.dim() > 0 and tensor.numel() > 0]
    return tensors if all(tensor.is_contiguous() for tensor in tensors) else []


class GradualTransfer:
    """From one rank to newcomers, in so many steps. All ranks make it, and call the same methods.

    Args:
        ddp: the model.
        optimizer: its optimizer.
        source: the rank that has everything.
        newcomers: the ranks that have not.
        step_bytes: how many bytes travel in a step.
        total_bytes: of what `travels_later` returns on the source.
        is_mean: whether gradients are averaged, and not added.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        source: int,
        newcomers: Sequence[int],
        step_bytes: int,
        total_bytes: int,
        *,
        is_mean: bool,
    ) -> None:
        self._group = ddp.process_group
        self._source = source
        self._newcomers = newcomers
        self._step_bytes = step_bytes
        self._total = total_bytes
        self._at = 0
        self._part = torch.empty(0)
        self._works: list[dist.Work] | None = None
        rank, size = self._group.rank(), self._group.size()
        self.is_newcomer = rank in newcomers
        self._is_source = rank == source
        has_tensors = self.is_newcomer or self._is_source
        self._tensors = travels_later(ddp, optimizer) if has_tensors else []
        self._device = trainable_parameters(ddp)[0].device
        weight = size / (size - len(newcomers)) if is_mean else 1.0
        change: Callable[[Tensor], Tensor] = torch.zeros_like if self.is_newcomer else lambda g: g * weight
        parameters: list[Any] = trainable_parameters(ddp)
        self._hooks: list[Any] = [p.register_hook(change) for p in parameters]
        # What has come must be there before the optimizer changes it.
        self._hooks.append(unwrapped(optimizer).register_step_pre_hook(lambda *_: self.end_part()))

    @property
    def is_over(self) -> bool:
        """Whether all is there."""
        return self._at == self._total

    def begin_part(self) -> None:
        """Send what this step has room for, before its forward."""
        self._works = []
        if not (self._is_source or self.is_newcomer):
            return
        self._part = torch.empty(self._bytes_of_part(), dtype=torch.uint8, device=self._device)
        if self._is_source:
            self._copy(lambda part, tensor: part.copy_(tensor))
            works = [dist.isend(self._part, group=self._group, group_dst=rank) for rank in self._newcomers]
        else:
            works = [dist.irecv(self._part, group=self._group, group_src=self._source)]
        self._works = [work for work in works if work is not None]

    def end_part(self) -> None:
        """Have what has come: before the optimizer's step, or at the end of a block without one."""
        if self._works is None:
            return
        for work in self._works:
            work.wait()
        if self.is_newcomer:
            self._copy(lambda part, tensor: tensor.copy_(part))
        self._works = None
        self._at += self._bytes_of_part()

    def stop(self) -> None:
        """Leave gradients and optimizer as they were."""
        for hook in self._hooks:
            hook.remove()

    def _bytes_of_part(self) -> int:
        return min(self._step_bytes, self._total - self._at)

    @torch.no_grad()
    def _copy(self, copy: Callable[[Tensor, Tensor], Any]) -> None:
        """Copy between the part and the places of its bytes."""
        begin = -self._at
        for tensor in self._tensors:
            flat = tensor.view(-1).view(torch.uint8)
            first, last = max(0, -begin), min(flat.numel(), self._part.numel() - begin)
            if first < last:
                copy(self._part[begin + first : begin + last], flat[first:last])
            begin += flat.numel()
