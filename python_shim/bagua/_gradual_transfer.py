# SPDX-License-Identifier: Apache-2.0
"""Gives newcomers weights and optimizer state while all train: a part in each step, which later steps keep right.

An optimizer that treats each number by itself changes what has come as it does on the other ranks, as all have the same
gradients: a weight has to come together with its state. It changes what has not come yet to no purpose. Newcomers give
zeros to the mean of the gradients, and the others so much more that it stays theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


# After so many steps the part grows while a step takes no longer. At most so many tell how long one takes: it is what a
# quarter of them keep to, as the first are slower on a newcomer, and some are on any machine.
_FIRST = 3
_MOST_FIRST = 8
_GROWTH = 4


def can_be_gradual(ddp: DistributedDataParallel, optimizer: Optimizer) -> bool:
    """Whether weights can come one after another: the optimizer treats each by itself, and has all of them."""
    optimizer = unwrapped(optimizer)
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    parameters = trainable_parameters(ddp)
    return type(optimizer) in _ELEMENTWISE and all(p in optimized and p.is_contiguous() for p in parameters)


def gradual_parameters(ddp: DistributedDataParallel, optimizer: Optimizer) -> list[int]:
    """Return which of the trainable parameters need not be there before a newcomer's first step.

    One whose state has yet to be made has to be: that would be made from a weight that is not there.
    """
    optimizer = unwrapped(optimizer)
    keeps_none = type(optimizer) is optim.SGD and all(group["momentum"] == 0 for group in optimizer.param_groups)
    chosen = []
    for index, p in enumerate(trainable_parameters(ddp)):
        tensors = tensors_of(p, optimizer)
        is_dense = p.dim() > 0 and p.numel() > 0 and all(tensor.is_contiguous() for tensor in tensors)
        if is_dense and (keeps_none or len(tensors) > 1):
            chosen.append(index)
    return chosen


def tensors_of(parameter: Tensor, optimizer: Optimizer) -> list[Tensor]:
    """Return a parameter and what its optimizer keeps for each number of it, in the same order on all ranks."""
    state = unwrapped(optimizer).state.get(parameter, {})
    kept = [state[key] for key in sorted(state) if isinstance(state[key], Tensor) and state[key].dim() > 0]
    return [parameter.detach(), *(tensor for tensor in kept if tensor.shape == parameter.shape)]


class Pace:
    """How many numbers travel in a step: more, as long as steps take no longer for them. The same on all ranks.

    Args:
        least: so many travel at first, and always may.
        share: by what share of its time a step may become longer.
    """

    def __init__(self, least: int, share: float) -> None:
        self.numbers = self._least = least
        self._share = share
        # Of the step before.
        self._last = 0
        self._first_seconds: list[float] = []

    def end_step(self, seconds: float) -> None:
        """Set the numbers of the next step; the slowest rank took `seconds` for the last step but one."""
        measured, self._last = self._last, self.numbers
        if measured == 0:
            return
        if len(self._first_seconds) < _MOST_FIRST:
            self._first_seconds.append(seconds)
        if len(self._first_seconds) < _FIRST:
            return
        longer = seconds / sorted(self._first_seconds)[len(self._first_seconds) // 4] - 1
        if longer > self._share:
            self.numbers = max(self._least, measured // 2)
        elif longer > self._share / 2:
            self.numbers = measured
        else:
            self.numbers = max(self.numbers, _GROWTH * measured)


class GradualTransfer:
    """From one rank to newcomers, in so many steps. All ranks make it, and call the same methods.

    Args:
        source: the rank that has everything.
        newcomers: the ranks that have not.
        parameters: which of the trainable parameters travel; empty on ranks that are neither.
        step_numbers: how many numbers of them, with their state, travel in a step at first.
        total_numbers: how many there are.
        share: by what share of its time a step may become longer for more of them.
        is_mean: whether gradients are averaged, and not added.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        source: int,
        newcomers: Sequence[int],
        parameters: Sequence[int],
        *,
        step_numbers: int,
        total_numbers: int,
        share: float,
        is_mean: bool,
    ) -> None:
        self._group = ddp.process_group
        self._source = source
        self._newcomers = newcomers
        self.pace = Pace(step_numbers, share)
        self._total = total_numbers
        self._at = 0
        self._part = torch.empty(0)
        self._works: list[dist.Work] | None = None
        rank, size = self._group.rank(), self._group.size()
        self.is_newcomer = rank in newcomers
        self._is_source = rank == source
        trained: list[Any] = trainable_parameters(ddp)
        self._tensors = [tensors_of(trained[index], optimizer) for index in parameters]
        if self._is_source or self.is_newcomer:
            assert sum(tensors[0].numel() for tensors in self._tensors) == total_numbers
        weight = size / (size - len(newcomers)) if is_mean else 1.0
        change: Callable[[Tensor], Tensor] = torch.zeros_like if self.is_newcomer else lambda g: g * weight
        self._hooks: list[Any] = [p.register_hook(change) for p in trained]
        # What has come must be there before the optimizer changes it.
        self._hooks.append(unwrapped(optimizer).register_step_pre_hook(lambda *_: self.end_part()))

    @property
    def is_over(self) -> bool:
        return self._at == self._total

    @torch.no_grad()
    def begin_part(self) -> None:
        """Send what this step has room for, before its forward."""
        self._works = []
        places = list(self._places())
        if not places:
            return
        if self._is_source:
            self._part = torch.cat(places)
            works = [dist.isend(self._part, group=self._group, group_dst=rank) for rank in self._newcomers]
        else:
            size = sum(place.numel() for place in places)
            self._part = torch.empty(size, dtype=torch.uint8, device=places[0].device)
            works = [dist.irecv(self._part, group=self._group, group_src=self._source)]
        self._works = [work for work in works if work is not None]

    @torch.no_grad()
    def end_part(self) -> None:
        """Have what has come: before the optimizer's step, or at the end of a block without one."""
        if self._works is None:
            return
        for work in self._works:
            work.wait()
        if self.is_newcomer:
            places = list(self._places())
            for place, came in zip(places, torch.split(self._part, [place.numel() for place in places]), strict=True):
                place.copy_(came)
        self._works = None
        self._at += self._numbers_of_part()

    def stop(self) -> None:
        """Leave gradients and optimizer as they were."""
        for hook in self._hooks:
            hook.remove()

    def _numbers_of_part(self) -> int:
        return min(self.pace.numbers, self._total - self._at)

    def _places(self) -> Iterator[Tensor]:
        """Where the bytes of the part at hand are, each weight's together with those of its state."""
        begin = -self._at
        for tensors in self._tensors:
            count = tensors[0].numel()
            first, last = max(0, -begin), min(count, self._numbers_of_part() - begin)
            if first < last:
                yield from (tensor.view(-1)[first:last].view(torch.uint8) for tensor in tensors)
            begin += count
