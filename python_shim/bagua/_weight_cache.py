# SPDX-License-Identifier: Apache-2.0
"""Weights that `fully_shard` has sharded are gathered over the network once a step, and frozen ones once ever."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua._executors import shared_executors_for
from bagua._native import _C
from bagua._sharded_model import ShardedModel
from bagua._torch_private import (
    backward_id,
    comm_of_fsdp,
    eager,
    gathered_dtype,
    padded_shard,
    reshards_after_forward,
    shape_in_buffer,
    shard_group,
    shard_moment,
    version_of,
)
from bagua._weight_changes import WeightChanges, are_finite

# Where a parameter begins in a rank's part of what is gathered, how long it is, and whether it is trained.
_Column = tuple[int, int, bool]

_logger = logging.getLogger("bagua")


def _in_columns(output: Tensor, parts: Tensor, columns: Sequence[_Column]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return where each column of all ranks' parts belongs, and its values among those that lie next to each other."""
    place = 0
    for begin, length, _ in columns:
        yield output.narrow(1, begin, length), parts.narrow(1, place, length)
        place += length


class CachedGather:
    """FSDP2's all-gather of one group of parameters, which keeps what it has gathered in host memory.

    A gather in a backward is served from that of the forward. In a forward only what is trained is gathered again, as
    long as nobody has changed a frozen shard. On CPU tensors the memory is that into which FSDP2 gathers.

    With a codec it is the coded difference to what the other ranks hold of a shard that is gathered, and each rank
    computes with what all hold, its own shard too: what a difference has lost is in the next one. Without a step of an
    optimizer nothing is gathered. Weights that were changed in another way are gathered in full. Where a version tells
    of it all ranks know; a rank that finds it by itself makes its difference NaN, which all others see in what they
    decode, as they see one of weights that are not finite.

    What a group with frozen weights gathers depends on whether this rank finds them changed. Ranks that find different
    things could exchange weights of two groups, where these are as long. So each part ends with the group's number.

    Args:
        group: FSDP2's group of parameters.
        number: which group of the model it is.
        names: those of its parameters.
        weights: "cache", or the codec of differences.
        said: what all groups of the model have warned of.
    """

    def __init__(self, group: Any, number: int, names: Sequence[str], weights: str, said: set[str]) -> None:
        self._group = group
        self._names = names
        self._weights = weights
        self._number = torch.tensor([number], device=group.device)
        self._key = f"held.{number}"
        self._codec = None if weights == "cache" else weights
        self._changes = WeightChanges(group, has_digests=self._codec is not None)
        self._said = said
        # How often it has gathered, and the bytes of this rank's weights that went into that.
        self.gathers = 0
        self.given_bytes = 0
        # This rank's shards as they were when the others got them, and how many steps optimizers had taken then.
        self._given: Tensor | None = None
        self._steps = -1
        self._former = comm_of_fsdp(group, "all_gather")
        self._cache: Tensor | None = None
        # Whether it holds the last gather, and of which moments of this rank's shards.
        self._is_complete = False
        self._moments: list[tuple[int, ...]] = []
        # Which were frozen then. The moment of one that was trained since does not tell whether it was changed.
        self._were_frozen: list[bool] = []
        # What it holds in the place of this rank's own shards, where FSDP2 is about to put them as they are now.
        self._held: Tensor | None = None
        # The same of a run that this one continues, which the other ranks have yet to gather.
        self._loaded: Tensor | None = None

    def attach(self, model: ShardedModel) -> None:
        """Take the place of FSDP2's all-gather. Collective."""
        self._changes.watch()
        if self._codec is not None:
            shared_executors_for(shard_group(self._group), self._group.device)
        self._take_off = model.put_comm(self._group, "all_gather", self)

    def detach(self) -> None:
        self._changes.unwatch()
        self._take_off()
        self._cache = self._given = self._held = None

    def progress(self) -> tuple[int, int]:
        """Return what differs once weights were trained; on all ranks alike."""
        return self._changes.steps, sum(version_of(parameter.sharded_param) for parameter in self._group.fsdp_params)

    def has_frozen(self) -> bool:
        """Return whether it serves gathers of weights that are frozen."""
        return self._is_complete and not all(p.sharded_param.requires_grad for p in self._group.fsdp_params)

    def have_frozen_changed(self) -> bool:
        """Return whether a frozen shard of this rank has other bits than the ranks have gathered."""
        if not self._is_complete or self._cache is None or not self._cache.is_cpu:
            return False
        ranks = shard_group(self._group)
        former = self._cache.chunk(ranks.size())[ranks.rank()] if self._given is None else self._given
        for parameter, (begin, length, is_trained) in zip(self._group.fsdp_params, self._columns(former), strict=False):
            if not is_trained:
                now = padded_shard(parameter).reshape(-1).to(gathered_dtype(parameter)).view(torch.uint8)
                held = former.narrow(0, begin, length).view(torch.uint8)
                # Tensor subclasses say themselves what is gathered.
                if now.numel() == held.numel() and not torch.equal(now, held):
                    return True
        return False

    def forget(self) -> None:
        """Have the group gathered in full; on all ranks."""
        self._is_complete = False

    def state(self) -> dict[str, Tensor]:
        """Return what all ranks hold of this rank's shards, from which coded differences go on, and of which moment."""
        ranks, changes = shard_group(self._group), self._changes
        if self._codec is None or not self._is_complete or self._cache is None or changes.moved() is not None:
            return {}
        held = self._cache.chunk(ranks.size())[ranks.rank()].clone()
        moment = [int(self._steps != changes.steps), *changes.digests]
        return {self._key: held, f"{self._key}.moment": torch.tensor(moment)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has returned."""
        self.forget()
        self._loaded = None
        if self._codec is None or self._key not in state:
            return
        self._changes.note()
        is_stepped, *digests = state[f"{self._key}.moment"].tolist()
        self._steps = self._changes.steps - is_stepped
        self._loaded = state[self._key].clone()
        if digests != self._changes.digests:
            # These are not the weights of that moment: all ranks see it, and gather them in full.
            self._loaded.fill_(torch.nan)

    def _gather_loaded(self, output: Tensor, shards: Tensor, group: dist.ProcessGroup) -> bool:
        """Gather what the ranks held in the run that this one continues; returns whether they can go on from it."""
        loaded, self._loaded, self._given, self._cache = self._loaded, None, shards.clone(), output
        assert loaded is not None
        self._held = torch.cat(
            [(loaded if is_trained else shards).narrow(0, b, n) for b, n, is_trained in self._columns(shards)]
        )
        self._exchange(output, self._held, group, is_coded=False)
        # This look comes before this rank's weights take the place of what it has sent, so that all ranks see the same.
        can_go_on = are_finite(output)
        shards.copy_(self._given)
        return can_go_on

    @property
    def bytes(self) -> int:
        return 0 if self._cache is None else self._cache.nbytes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory to gather into, for FSDP2."""
        cache, self._held = self._cache, None
        if cache is None or cache.dtype != dtype or cache.numel() != torch.Size(size).numel():
            self._is_complete = False
            cache = None
        if cache is None or device.type != "cpu":
            # Trainings write to what an evaluation in inference mode may be the first to gather into.
            with torch.inference_mode(False):
                memory: Tensor = self._former.allocate(size, dtype=dtype, device=device)
            return memory
        if self._is_complete:
            ranks = shard_group(self._group)
            self._held = cache.chunk(ranks.size())[ranks.rank()].clone()
        return cache

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor`, of which this rank's part is `input_tensor`. It is full when this returns."""
        parameters = self._group.fsdp_params
        moments = [shard_moment(parameter) for parameter in parameters]
        is_frozen = [not parameter.sharded_param.requires_grad for parameter in parameters]
        if self._loaded is not None:
            self._is_complete = self._gather_loaded(output_tensor, input_tensor, group)
            self._moments, self._were_frozen = moments, is_frozen
        is_known = self._is_complete and all(
            was and own == other
            for own, other, was, counts in zip(moments, self._moments, self._were_frozen, is_frozen, strict=True)
            if counts
        )
        columns = self._columns(input_tensor)
        to_gather = columns
        may_differ = False
        # A backward may prefetch what its forward has left out, and gathered before the last step of an optimizer.
        if is_known and backward_id() and self._steps == self._changes.steps:
            self._check(columns, input_tensor, is_backward=True)
            to_gather = []
        elif is_known and self._codec is not None and (moved := self._changes.moved()) is not None:
            self._warn(moved)
            is_known = False
        elif is_known and self._codec is not None and self._steps == self._changes.steps:
            self._check(columns, input_tensor)
            to_gather = []
        elif is_known:
            may_differ = self._codec is not None
            to_gather = [column for column in columns if column[2] or not any(is_frozen)]
            self._check([column for column in columns if column not in to_gather], input_tensor)
        self._is_complete = False
        has_rest = to_gather != columns or may_differ
        if has_rest and self._cache is not None and self._cache is not output_tensor:
            # In which FSDP2 has put this rank's shards already, as they are now.
            own = input_tensor.clone()
            output_tensor.copy_(self._cache, non_blocking=True)
            input_tensor.copy_(own)
        given = input_tensor.clone() if self._codec is not None else None
        if self._codec is not None and is_known and self._held is not None:
            base = self._held
            input_tensor.copy_(base)
            assert given is not None
            is_done = not to_gather or self._gather_differences(output_tensor, given, group, to_gather, base)
            if not is_done:
                self._gather(output_tensor, given, group, to_gather)
        elif to_gather == columns and not any(is_frozen):
            self._exchange(output_tensor, input_tensor, group, is_coded=False)
        elif to_gather:
            self._gather(output_tensor, input_tensor, group, to_gather)
        if to_gather:
            self._changes.note()
        self._given, self._steps = given, self._changes.steps
        if any(is_frozen) or reshards_after_forward(self._group) or self._codec is not None:
            self._keep(output_tensor, has_changed=bool(to_gather))
            self._is_complete, self._moments, self._were_frozen = True, moments, is_frozen
        else:
            self._cache = None

    def _columns(self, shards: Tensor) -> list[_Column]:
        """Return where each parameter begins in this rank's part, how long it is, and whether it is trained."""
        parameters = self._group.fsdp_params
        are_bytes = shards.dtype == torch.uint8
        sizes = [gathered_dtype(parameter).itemsize if are_bytes else 1 for parameter in parameters]
        lengths = [shape_in_buffer(p).numel() * size for p, size in zip(parameters, sizes, strict=True)]
        if sum(lengths) != shards.numel():
            # Of tensor subclasses that say themselves what is gathered.
            return [(0, shards.numel(), any(p.sharded_param.requires_grad for p in parameters))]
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        trained = [bool(parameter.sharded_param.requires_grad) for parameter in parameters]
        return list(zip(begins, lengths, trained, strict=True))

    def _check(self, columns: Sequence[_Column], shards: Tensor, *, is_backward: bool = False) -> None:
        """Refuse shards that are no longer what was gathered: nobody would know of it on the other ranks."""
        changed = None
        if is_backward:
            moments = enumerate(zip(map(shard_moment, self._group.fsdp_params), self._moments, strict=True))
            changed = next((self._names[place] for place, (now, then) in moments if now != then), None)
        former = self._held if self._given is None else self._given
        if former is not None and changed is None:
            pairs = ((begin, former.narrow(0, begin, n), shards.narrow(0, begin, n)) for begin, n, _ in columns)
            begins = (begin for begin, *two in pairs if not torch.equal(*(one.view(torch.uint8) for one in two)))
            changed = next((self._name_at(begin, shards) for begin in begins), None)
        if changed is None:
            return
        # FSDP2 has put the new shards into the cache already. Who tries again gathers everything.
        self._is_complete = False
        if is_backward:
            raise RuntimeError(
                f"bagua.fsdp: {changed} was changed between its forward and its backward, for both of which "
                f"weights={self._weights!r} gathers it once: change weights before the forward or after the backward, "
                "or leave weights= out"
            )
        raise RuntimeError(
            f"bagua.fsdp: {changed} was changed since weights={self._weights!r} has gathered it, without a step of an "
            "optimizer of torch, and where its version does not tell of it, so that other ranks cannot know: through "
            ".data, to_local() or torch._foreach_ functions. Change the parameter itself on all ranks, under "
            "torch.no_grad() (copy_, lerp_) or by load_state_dict, as to swap averaged weights in; derive an optimizer "
            "of your own from torch.optim.Optimizer"
        )

    def _name_at(self, begin: int, shards: Tensor) -> str:
        """Return the name of the parameter whose column begins there."""
        columns = self._columns(shards)
        if len(columns) != len(self._names):
            return f"one of {', '.join(self._names)}"
        return next(name for name, column in zip(self._names, columns, strict=True) if column[0] == begin and column[1])

    def _warn(self, place: int) -> None:
        """Say once that something costs gathers in full precision."""
        if not self._said and shard_group(self._group).rank() == 0:
            _logger.warning(
                "weights=%r: %s was changed other than by a step of an optimizer of torch. What changes so is gathered "
                "in full precision",
                self._weights,
                self._names[place],
            )
        self._said.add("changed")

    def _gather(self, output: Tensor, shards: Tensor, group: dist.ProcessGroup, columns: Sequence[_Column]) -> None:
        """Gather these columns of all ranks' parts."""
        number = self._number.view(shards.dtype)
        own = torch.cat([*(shards.narrow(0, begin, length) for begin, length, _ in columns), number])
        gathered = torch.empty(group.size() * own.numel(), dtype=own.dtype, device=own.device)
        self._exchange(gathered, own, group, is_coded=False)
        parts = gathered.view(group.size(), -1)
        # A device would have to be waited for.
        if own.is_cpu and (parts[:, -len(number) :].contiguous().view(torch.int64) != self._number).any():
            raise RuntimeError(
                "bagua.fsdp: the ranks gather weights of different groups of parameters: frozen weights were changed "
                "on some of them alone. Change them on all ranks alike"
            )
        for target, values in _in_columns(output.view(group.size(), -1), parts, columns):
            target.copy_(values)

    def _gather_differences(
        self, output: Tensor, shards: Tensor, group: dist.ProcessGroup, columns: Sequence[_Column], base: Tensor
    ) -> bool:
        """Add what these columns of all ranks' parts have become since all ranks had `base` of this rank's.

        Returns False, on all ranks, and adds nothing, where one rank has no difference to give.
        """
        own = torch.cat([shards.narrow(0, b, n).float() - base.narrow(0, b, n).float() for b, n, _ in columns])
        if (moved := self._changes.moved_here()) is not None:
            self._warn(moved)
            own.fill_(torch.nan)
        gathered = torch.empty(group.size() * own.numel(), dtype=own.dtype, device=own.device)
        self._exchange(gathered, own, group, is_coded=True)
        if not are_finite(gathered):
            return False
        for target, values in _in_columns(output.view(group.size(), -1), gathered.view(group.size(), -1), columns):
            target.add_(values)
        return True

    def _exchange(self, output: Tensor, own: Tensor, group: dist.ProcessGroup, *, is_coded: bool) -> None:
        self.gathers += 1
        if is_coded:
            assert self._codec is not None
            self.given_bytes += _C.packed_bytes(self._codec, own.numel())
            executors = shared_executors_for(shard_group(self._group), self._group.device)
            _C.compressed_all_gather(executors, output, own, self._codec, True).wait()
        else:
            self.given_bytes += own.nbytes
            self._former(output_tensor=output, input_tensor=own, group=group, async_op=False)

    def _keep(self, output: Tensor, *, has_changed: bool) -> None:
        if output.device.type == "cpu":
            self._cache = output
        elif self._cache is None or self._cache.numel() != output.numel() or self._cache.dtype != output.dtype:
            self._cache = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
            self._cache.copy_(output, non_blocking=True)
        elif has_changed:
            self._cache.copy_(output, non_blocking=True)


class FrozenWeights:
    """Has all ranks gather frozen weights anew that one of them has found changed, where no version tells of it.

    Nothing of them travels that could say so. So in the first forward after weights were trained, where there are
    frozen ones, the ranks exchange a byte for each group of parameters.
    """

    def __init__(self, model: nn.Module, caches: Sequence[CachedGather], group: dist.ProcessGroup) -> None:
        self._caches = caches
        self._group = group
        self._progress: list[tuple[int, int]] = []
        # Before FSDP2 gathers.
        self.remove: Callable[[], None] = model.register_forward_pre_hook(self._before_forward, prepend=True).remove

    @eager
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        progress = [cache.progress() for cache in self._caches]
        if progress == self._progress or not any(cache.has_frozen() for cache in self._caches):
            return
        self._progress = progress
        changed = torch.tensor([cache.have_frozen_changed() for cache in self._caches], dtype=torch.uint8)
        dist.all_reduce(changed, dist.ReduceOp.MAX, self._group)
        for cache, has_changed in zip(self._caches, changed.tolist(), strict=True):
            if has_changed:
                cache.forget()
