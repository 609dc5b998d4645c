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
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from bagua._attachment import trainable_parameters, unwrapped
from bagua._optimizers import ELEMENTWISE

# After so many steps the part grows while a step takes no longer. At most so many tell how long one takes: it is what a
# quarter of them keep to, as the first are slower on a newcomer, and some are on any machine.
_FIRST = 3
_MOST_FIRST = 8
_GROWTH = 4
# Seconds. A transfer that would take longer ends sooner by steps that take so many more.
_SOON = 30.0
_MORE = 4.0
_MOST_GROWTH = 8


def can_be_gradual(ddp: DistributedDataParallel, optimizer: Optimizer) -> bool:
    """Whether weights can come one after another: the optimizer treats each by itself, and has all of them."""
    optimizer = unwrapped(optimizer)
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    parameters = trainable_parameters(ddp)
    return type(optimizer) in ELEMENTWISE and all(p in optimized and p.is_contiguous() for p in parameters)


def gradual_parameters(ddp: DistributedDataParallel, optimizer: Optimizer) -> list[int]:
    """Return which of the trainable parameters need not be there before a newcomer's first step.

    One whose state has yet to be made has to be: that would be made from a weight that is not there.
    """
    optimizer = unwrapped(optimizer)
    keeps_none = type(optimizer) is SGD and all(group["momentum"] == 0 for group in optimizer.param_groups)
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

    On a busy line what the others lose in all is the time that the numbers take, however they are spread, but a
    newcomer is lost for all of the transfer, and those that come after it wait: a long one is made short.

    Args:
        least: so many travel at first, and always may.
        share: by what share of its time a step may become longer, unless all would take too long.
    """

    def __init__(self, least: int, share: float) -> None:
        self.numbers = self._least = least
        self._share = share
        # Of the step before.
        self._last = 0
        self._first_seconds: list[float] = []
        self._is_long = False

    def end_step(self, seconds: float, left: int) -> None:
        """Set the numbers of the next step.

        Args:
            seconds: what the slowest rank took for the step before the one that has ended now.
            left: how many numbers have yet to travel.
        """
        measured, self._last = self._last, self.numbers
        if measured == 0:
            return
        if len(self._first_seconds) < _MOST_FIRST:
            self._first_seconds.append(seconds)
        if len(self._first_seconds) < _FIRST:
            return
        usual = sorted(self._first_seconds)[len(self._first_seconds) // 4]
        longer, most = seconds - usual, self._share * usual
        if longer > most / 2 and left / measured * usual > _SOON:
            self._is_long = True
        if self._is_long:
            fitting = int(measured * _MORE / max(longer, usual / 100))
            self.numbers = min(max(self._least, fitting), _MOST_GROWTH * measured)
        elif longer > most:
            self.numbers = max(self._least, measured // 2)
        elif longer > most / 2:
            self.numbers = measured
        else:
            self.numbers = max(self.numbers, _GROWTH * measured)


class GradualTransfer:
    """From one rank to newcomers, in so many steps. All ranks make it, and call the same methods.

    The source sends to the first newcomer only, and each of them to the next one what it has before the step, so that a
    line carries no part twice.

    Args:
        source: the rank that has everything.
        newcomers: the ranks that have not, with how many numbers they have already; those with the most first.
        parameters: which of the trainable parameters travel; empty on ranks that are neither.
        step_numbers: how many numbers of them, with their state, travel in a step at first.
        total_numbers: how many there are.
        share: by what share of its time a step may become longer for more of them, see Pace.
        is_mean: whether gradients are averaged, and not added.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        source: int,
        newcomers: dict[int, int],
        parameters: Sequence[int],
        *,
        step_numbers: int,
        total_numbers: int,
        share: float,
        is_mean: bool,
    ) -> None:
        self.parameters = list(parameters)
        self._group = ddp.process_group
        self._chain = [source, *newcomers]
        # How many numbers each one has.
        self._numbers_there = [total_numbers, *newcomers.values()]
        self._pace = Pace(step_numbers, share)
        self._total = total_numbers
        # Since the first newcomer has all, which waits for those that are a part behind, and no longer.
        self._steps_of_waiting = 0
        self._works: list[dist.Work | None] | None = None
        # What has to live as long as these works, and where what comes belongs.
        self._sent = torch.empty(0)
        self._came: tuple[Tensor, list[Tensor]] | None = None
        rank, size = self._group.rank(), self._group.size()
        self._place = self._chain.index(rank) if rank in self._chain else -1
        self.is_newcomer = self._place > 0
        trained: list[Any] = trainable_parameters(ddp)
        self._tensors = [tensors_of(trained[index], optimizer) for index in parameters]
        if self._place >= 0:
            assert sum(tensors[0].numel() for tensors in self._tensors) == total_numbers
        weight = size / (size - len(newcomers)) if is_mean else 1.0
        change: Callable[[Tensor], Tensor] = torch.zeros_like if self.is_newcomer else lambda g: g * weight
        self._hooks: list[Any] = [p.register_hook(change) for p in trained]
        # What has come must be there before the optimizer changes it.
        self._hooks.append(unwrapped(optimizer).register_step_pre_hook(lambda *_: self.end_part()))

    @property
    def is_over(self) -> bool:
        """Whether all newcomers have all, or the first one has waited long enough for the others."""
        return self._numbers_there[-1] == self._total or self._steps_of_waiting > len(self._chain)

    @property
    def own_numbers(self) -> int:
        """How many numbers this newcomer has."""
        assert self.is_newcomer
        return self._numbers_there[self._place]

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all numbers."""
        return not self.is_newcomer or self.own_numbers == self._total

    @torch.no_grad()
    def begin_part(self) -> None:
        """Send what this step has room for, before its forward."""
        self._works = []
        if self._place < 0:
            return
        if self._place + 1 < len(self._chain) and (places := list(self._places(*self._part_of(self._place + 1)))):
            self._sent = torch.cat(places)
            self._works.append(dist.isend(self._sent, group=self._group, group_dst=self._chain[self._place + 1]))
        if self.is_newcomer and (places := list(self._places(*self._part_of(self._place)))):
            size = sum(place.numel() for place in places)
            part = torch.empty(size, dtype=torch.uint8, device=places[0].device)
            self._came = part, places
            self._works.append(dist.irecv(part, group=self._group, group_src=self._chain[self._place - 1]))

    @torch.no_grad()
    def end_part(self) -> None:
        """Have what has come: before the optimizer's step, or at the end of a block without one."""
        if self._works is None:
            return
        for work in self._works:
            assert work is not None
            work.wait()
        if self._came is not None:
            part, places = self._came
            for place, came in zip(places, torch.split(part, [place.numel() for place in places]), strict=True):
                place.copy_(came)
        self._works = self._came = None
        self._sent = torch.empty(0)
        self._numbers_there[1:] = [self._part_of(place)[1] for place in range(1, len(self._chain))]
        self._steps_of_waiting += self._numbers_there[1] == self._total

    def pace(self, seconds: float) -> None:
        """Let later parts be larger while steps take no longer for them: see Pace.end_step, which this is for."""
        self._pace.end_step(seconds, self._total - self._numbers_there[-1])

    def stop(self) -> None:
        """Leave gradients and optimizer as they were, and hold nothing."""
        for hook in self._hooks:
            hook.remove()
        self._works = self._came = None
        self._sent = torch.empty(0)
        self._tensors = []

    def _part_of(self, place: int) -> tuple[int, int]:
        """Return the first of the numbers that this step has for a newcomer, and the one behind the last."""
        begin = self._numbers_there[place]
        return begin, max(begin, min(begin + self._pace.numbers, self._numbers_there[place - 1]))

    def _places(self, begin: int, end: int) -> Iterator[Tensor]:
        """Where the bytes of these numbers are, each weight's together with those of its state."""
        for tensors in self._tensors:
            count = tensors[0].numel()
            first, last = max(0, begin), min(count, end)
            if first < last:
                yield from (tensor.view(-1)[first:last].view(torch.uint8) for tensor in tensors)
            begin, end = begin - count, end - count
