# SPDX-License-Identifier: Apache-2.0
"""Finds the sharded weights that something else than an optimizer of torch has changed since they were gathered."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bagua._torch_private import padded_shard, shard_moment

# Of the integers whose sum takes torch one look at them, and no conversion.
_WORD = torch.int64.itemsize

_watched: weakref.WeakSet[WeightChanges] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Have all that is watched know when an optimizer of torch takes a step."""

    def held_by(optimizer: Optimizer) -> set[int]:
        return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def before(optimizer: Optimizer, *_: object) -> None:
        held = held_by(optimizer)
        for changes in _watched:
            changes.before_step(held)

    def after(optimizer: Optimizer, *_: object) -> None:
        held = held_by(optimizer)
        for changes in _watched:
            changes.after_step(held)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _digest_of(parameter: Any) -> int:
    """Return what all but surely differs once this rank's trained shard has other bits, however they came there."""
    if not parameter.sharded_param.requires_grad:
        return 0
    own = padded_shard(parameter).reshape(-1).view(torch.uint8)
    if own.storage_offset() % _WORD:
        own = own.clone()
    words = len(own) // _WORD * _WORD
    return int(own[:words].view(torch.int64).sum() + own[words:].sum())


class WeightChanges:
    """What has become of one group of parameters since it was gathered.

    Operations on a parameter count its version up, on all ranks alike, as those of most optimizers do: so the versions
    are noted after each step, and one that moves between steps is a change of another kind. Operations on many tensors
    at once (`torch._foreach_lerp_`), `.data` and `to_local()` leave the version as it was. These are found by the bits
    of this rank's shard alone, with `has_digests`, and a rank whose shard is empty sees nothing of them.
    """

    def __init__(self, group: Any, *, has_digests: bool) -> None:
        self._group = group
        self._has_digests = has_digests
        # By the id of each parameter, as they were when all ranks got to know them.
        self._places: dict[int, int] = {}
        self._moments: list[tuple[int, ...]] = []
        self.digests: list[int] = []
        self._changed_before_step: int | None = None
        # How many steps optimizers have taken that hold one of the parameters; the same number on all ranks.
        self.steps = 0

    def watch(self) -> None:
        _watch_optimizers()
        _watched.add(self)

    def unwatch(self) -> None:
        _watched.discard(self)

    def note(self) -> None:
        """Note that the weights are known to all ranks as they are now."""
        self._places = {id(parameter.sharded_param): i for i, parameter in enumerate(self._group.fsdp_params)}
        self._moments = [shard_moment(parameter) for parameter in self._group.fsdp_params]
        if self._has_digests:
            self.digests = [_digest_of(parameter) for parameter in self._group.fsdp_params]
        self._changed_before_step = None

    def _places_of(self, held: Set[int]) -> list[int]:
        fewer: Collection[int] = min(held, self._places, key=len)
        return [self._places[one] for one in fewer if one in held and one in self._places]

    def before_step(self, held: Set[int]) -> None:
        """Look at what a step of an optimizer of the parameters with these ids is about to hide."""
        if self._places_of(held):
            self._changed_before_step = self.moved()

    def after_step(self, held: Set[int]) -> None:
        """Note what the step has made of its parameters."""
        places = self._places_of(held)
        self.steps += bool(places)
        for place in places:
            parameter = self._group.fsdp_params[place]
            self._moments[place] = shard_moment(parameter)
            if self._has_digests:
                self.digests[place] = _digest_of(parameter)

    def moved(self) -> int | None:
        """Return the place of a parameter that was changed other than by a step; found by all ranks alike."""
        if self._changed_before_step is not None:
            return self._changed_before_step
        moments = map(shard_moment, self._group.fsdp_params)
        return next((i for i, pair in enumerate(zip(moments, self._moments, strict=True)) if pair[0] != pair[1]), None)

    def moved_here(self) -> int | None:
        """Return the place of a parameter that was changed other than by a step; found by this rank alone."""
        digests = map(_digest_of, self._group.fsdp_params)
        return next((i for i, pair in enumerate(zip(digests, self.digests, strict=True)) if pair[0] != pair[1]), None)


def are_finite(values: Tensor) -> bool:
    """Return whether all values are: in one look, without memory for the answers."""
    return not values.numel() or all(bool(bound.isfinite()) for bound in values.aminmax())
