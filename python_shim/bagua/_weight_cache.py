# SPDX-License-Identifier: Apache-2.0
"""Weights that `fully_shard` has sharded are gathered over the network once a step, and frozen ones once ever."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua._executors import shared_executors_for
from bagua._native import _C
from bagua._torch_private import (
    comm_of_fsdp,
    gathered_dtype,
    is_in_backward,
    reshards_after_forward,
    set_comm_of_fsdp,
    shape_in_buffer,
    shard_group,
    shard_moment,
)

_coded: weakref.WeakSet[CachedGather] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Have caches that code differences count the steps of optimizers that hold one of their parameters."""

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for cache in _coded:
            cache.note_step(held)

    register_optimizer_step_post_hook(count)


class CachedGather:
    """FSDP2's all-gather of one group of parameters, which keeps what it has gathered in host memory.

    A gather in a backward is served from that of the forward. In a forward only what is trained is gathered again, as
    long as nobody has changed a frozen shard. On CPU tensors the memory is that into which FSDP2 gathers.

    With a codec it is the coded difference to what the other ranks hold of a shard that is gathered, and each rank
    computes with what all hold, its own shard too: what a difference has lost is in the next one. Without a step of an
    optimizer nothing is gathered.

    What a group with frozen weights gathers depends on whether this rank finds them changed. Ranks that find different
    things could exchange weights of two groups, where these are as long. So each part ends with the group's number.

    Args:
        group: FSDP2's group of parameters.
        number: which group of the model it is.
        codec: of differences; None: in full precision.
    """

    def __init__(self, group: Any, number: int, codec: str | None = None) -> None:
        self._group = group
        self._number = torch.tensor([number], device=group.device)
        self._codec = codec
        # How often it has gathered, and the bytes of this rank's weights that went into that.
        self.gathers = 0
        self.given_bytes = 0
        # This rank's shards as they were when the others got them, and how many steps optimizers had taken then.
        self._given: Tensor | None = None
        self._steps = -1
        self._steps_taken = 0
        self._former = comm_of_fsdp(group, "all_gather")
        self._cache: Tensor | None = None
        # Whether it holds the last gather, and of which moments of this rank's shards.
        self._is_complete = False
        self._moments: list[tuple[int, int, int]] = []
        # Which were frozen then. The moment of one that was trained since does not tell whether it was changed.
        self._were_frozen: list[bool] = []
        # What it holds in the place of this rank's own shards, where FSDP2 is about to put them as they are now.
        self._held: Tensor | None = None

    def attach(self) -> None:
        """Take the place of FSDP2's all-gather. Collective."""
        if self._codec is not None:
            _watch_optimizers()
            _coded.add(self)
            shared_executors_for(shard_group(self._group), self._group.device)
        set_comm_of_fsdp(self._group, "all_gather", self)

    def detach(self) -> None:
        _coded.discard(self)
        set_comm_of_fsdp(self._group, "all_gather", self._former)

    def note_step(self, held: Set[int]) -> None:
        """Count a step of an optimizer that holds the parameters with these ids; the same ones on all ranks."""
        if any(id(parameter.sharded_param) in held for parameter in self._group.fsdp_params):
            self._steps_taken += 1

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
        is_known = self._is_complete and all(
            was and own == other
            for own, other, was, counts in zip(moments, self._moments, self._were_frozen, is_frozen, strict=True)
            if counts
        )
        columns = self._columns(input_tensor)
        whole = [(0, input_tensor.numel())]
        to_gather: list[tuple[int, int]] = []
        if is_known and is_in_backward():
            self._check(whole, input_tensor, has_changed=moments != self._moments)
        elif is_known and self._codec is not None and self._steps == self._steps_taken:
            self._check(whole, input_tensor)
        elif is_known and any(is_frozen):
            to_gather = [column[:2] for column in columns if column[2]]
            self._check([column[:2] for column in columns if not column[2]], input_tensor)
        else:
            to_gather = whole
        self._is_complete = False
        has_rest = to_gather != whole or self._codec is not None
        if is_known and has_rest and self._cache is not None and self._cache is not output_tensor:
            output_tensor.copy_(self._cache, non_blocking=True)
        given = input_tensor.clone() if self._codec is not None else None
        base = self._held if is_known and self._codec is not None else None
        if base is not None:
            input_tensor.copy_(base)
        if base is None and to_gather == whole and not any(is_frozen):
            self._exchange(output_tensor, input_tensor, group, is_coded=False)
        elif to_gather:
            self._gather(output_tensor, input_tensor if given is None else given, group, to_gather, base)
        self._given, self._steps = given, self._steps_taken
        if any(is_frozen) or reshards_after_forward(self._group) or self._codec is not None:
            self._keep(output_tensor, has_changed=bool(to_gather))
            self._is_complete, self._moments, self._were_frozen = True, moments, is_frozen
        else:
            self._cache = None

    def _columns(self, shards: Tensor) -> list[tuple[int, int, bool]]:
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

    def _check(self, columns: Sequence[tuple[int, int]], shards: Tensor, *, has_changed: bool = False) -> None:
        """Refuse shards that are no longer what was gathered: nobody would know of it on the other ranks."""
        former = self._held if self._given is None else self._given
        if former is not None:
            for begin, length in columns:
                held, now = (one.narrow(0, begin, length).view(torch.uint8) for one in (former, shards))
                has_changed = has_changed or not torch.equal(held, now)
        if has_changed:
            # FSDP2 has put the new shards into the cache already. Who tries again gathers everything.
            self._is_complete = False
            raise RuntimeError(
                "bagua.fsdp: with weights= a weight was changed between its forward and its backward, a frozen one "
                "through .data, or a coded one without a step of an optimizer of torch: change frozen weights under "
                "torch.no_grad() instead"
            )

    def _gather(
        self,
        output: Tensor,
        shards: Tensor,
        group: dist.ProcessGroup,
        columns: Sequence[tuple[int, int]],
        base: Tensor | None,
    ) -> None:
        """Gather these columns of all ranks' parts, or add what they have become since all ranks had `base` of them."""
        pieces = [shards.narrow(0, *column) for column in columns]
        if base is None:
            pieces.append(self._number.view(shards.dtype))
        else:
            pieces = [
                piece.float() - base.narrow(0, *column).float() for piece, column in zip(pieces, columns, strict=True)
            ]
        own = torch.cat(pieces)
        gathered = torch.empty(group.size() * own.numel(), dtype=own.dtype, device=own.device)
        self._exchange(gathered, own, group, is_coded=base is not None)
        parts, rows, place = gathered.view(group.size(), -1), output.view(group.size(), -1), 0
        # A device would have to be waited for.
        if (
            base is None
            and own.is_cpu
            and (parts[:, -len(pieces[-1]) :].contiguous().view(torch.int64) != self._number).any()
        ):
            raise RuntimeError(
                "bagua.fsdp: the ranks gather weights of different groups of parameters: frozen weights were changed "
                "on some of them alone. Change them on all ranks alike"
            )
        for begin, length in columns:
            target, values = rows.narrow(1, begin, length), parts.narrow(1, place, length)
            target.copy_(values) if base is None else target.add_(values)
            place += length

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
