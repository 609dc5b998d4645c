# SPDX-License-Identifier: Apache-2.0
"""Decides which parameters of an optimizer are stepped together, and keeps them together."""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bagua.optimizers import QAdamOptimizer
from bagua.torch_api.contrib.fuse._chunk import Chunk, Run
from bagua.torch_api.contrib.fuse._elementwise import keeps_bits
from bagua.torch_api.contrib.fuse._layout import (
    PaddedStorages,
    contiguous_runs,
    is_dense,
    overlapping,
    owns_its_memory,
)

_logger = logging.getLogger("bagua")

# Moving parameters needs as much memory again, for one chunk at a time.
_CHUNK_BYTES = 256 << 20
# On the CPU the arithmetic of a larger parameter outweighs the calls by far, and to copy its gradient would cost more.
_CPU_PARAMETER_BYTES = 256 << 10
# Of all fused optimizers.
_PADDED = PaddedStorages()
_SHARED = "their memory is used by somebody else, too: a tied weight, or a state_dict() that is still held"
_WARNINGS = {
    "weights": "fuse_step: the weights of %d parameters were no longer in the memory they were flattened in, as after "
    "`parameter.data = ...`: they are moved back, or stepped one by one where somebody else uses their new memory",
    "gradients": "fuse_step: the gradients of %d parameters were replaced by other tensors, as by "
    "zero_grad(set_to_none=True): from now on gradients are copied in each step",
    "state": "fuse_step: the optimizer's state of %d parameters was replaced by other tensors: it is moved back",
}


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@functools.cache
def _holders_of_own_memory() -> int:
    return _holders(torch.empty(1, device="cpu"))


def _is_movable(parameter: Tensor) -> bool:
    """Whether nobody but the parameter itself would notice that its memory changes."""
    storage = parameter.untyped_storage()
    return (
        owns_its_memory(parameter)
        # Neither the memory of a NumPy array or a mapped file, nor that of several processes.
        and storage.resizable()
        and (parameter.is_cuda or not storage.is_shared())
        and _holders(parameter) <= _holders_of_own_memory()
    )


class GroupPlan:
    """The chunks of one parameter group."""

    def __init__(self, *, do_flatten: bool) -> None:
        self.chunks: list[Chunk] = []
        # Parameters that stay as they are because somebody else uses their memory.
        self.shared = 0
        self._do_flatten = do_flatten
        self._parameters: list[Tensor] = []
        self._frozen: list[Tensor] = []
        self._flags: tuple[Any, ...] = ()

    def is_current(self, group: dict[str, Any]) -> bool:
        """Whether the group consists of what the plan was made for, and nothing has been unfrozen."""
        parameters = group["params"]
        return (
            len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
            and self._flags == _flags(group)
            and all(p.grad is None for p in self._frozen)
        )

    def repair(self) -> int:
        """Move weights that have left their chunk back, or give them up. Returns how many had left."""
        count = 0
        for chunk in self.chunks:
            displaced = chunk.displaced()
            gone = {
                id(chunk.parameters[i])
                for i in displaced
                if not (chunk.is_ours and _is_movable(chunk.parameters[i]) and chunk.take_back(i))
            }
            if gone:
                chunk.keep({id(p) for p in chunk.members} - gone)
            count += len(displaced)
        return count

    def update(self, group: dict[str, Any], tied: set[int]) -> None:
        """Find chunks for what is in none. `tied` are the ids of parameters that share memory with others."""
        parameters = group["params"]
        present = {id(p) for p in parameters if keeps_bits(group, p.device, p.dtype)} - tied
        for chunk in self.chunks:
            chunk.keep(present)
        self.chunks = [chunk for chunk in self.chunks if len(chunk.members) > 1]
        placed = {id(p) for chunk in self.chunks for p in chunk.members}
        free: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
        for p in parameters:
            if id(p) in present and id(p) not in placed and _is_fusable(p, group):
                free[p.device, p.dtype].append(p)
        self.shared = 0
        for candidates in free.values():
            self._place(candidates)
        self._parameters, self._flags = list(parameters), _flags(group)
        self._frozen = [p for p in parameters if not _is_trained(p)]

    def _place(self, parameters: Sequence[Tensor]) -> None:
        movable: list[Tensor] = []
        fixed: list[Tensor] = []
        for p in parameters:
            (movable if self._do_flatten and _is_movable(p) else fixed).append(p)
        if len(movable) > 1:
            for part in _parts(movable):
                self.chunks.append(Chunk.move(part))
                _PADDED.add(self.chunks[-1].weights)
        runs = contiguous_runs(fixed, _PADDED)
        self.chunks += [Chunk.find([fixed[i] for i in run]) for run in runs]
        if len(parameters) > 1:
            self.shared += len(fixed) - sum(map(len, runs))


def _flags(group: dict[str, Any]) -> tuple[Any, ...]:
    return group.get("differentiable"), group.get("fused")


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def _is_fusable(parameter: Tensor, group: dict[str, Any]) -> bool:
    return (
        type(parameter) in (Tensor, torch.nn.Parameter)
        and parameter.layout == torch.strided
        and parameter.is_floating_point()
        # A 0-dim parameter's momentum could not be told from its number of steps.
        and parameter.dim() > 0
        and is_dense(parameter)
        and not parameter.is_inference()
        and _is_trained(parameter)
        and (parameter.is_cuda or parameter.numel() * parameter.element_size() <= _CPU_PARAMETER_BYTES)
        and keeps_bits(group, parameter.device, parameter.dtype)
    )


def _parts(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut the list so that no part takes too much memory."""
    parts: list[list[Tensor]] = [[]]
    size = 0
    for p in parameters:
        if size >= _CHUNK_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(p)
        size += p.numel() * p.element_size()
    return parts


class Fusion:
    """What `fuse_optimizer` hangs on an optimizer. It does not hold the optimizer."""

    def __init__(self, *, do_flatten: bool, check_flatten: bool) -> None:
        self._do_flatten = do_flatten
        self._check_flatten = check_flatten
        self._plans: list[GroupPlan] = []
        # A checkpoint brings new tensors, which is no reason for a warning.
        self.state_was_loaded = False

    def gather(self, optimizer: Optimizer) -> Counter[str]:
        """Bring weights and state to where they belong. Returns what was found elsewhere, and how often."""
        moved: Counter[str] = Counter()
        while len(self._plans) < len(optimizer.param_groups):
            self._plans.append(GroupPlan(do_flatten=self._do_flatten))
        del self._plans[len(optimizer.param_groups) :]
        plans = list(zip(self._plans, optimizer.param_groups, strict=True))
        strays = [plan.repair() for plan in self._plans]
        moved["weights"] = sum(strays)
        if any(strays) or not all(plan.is_current(group) for plan, group in plans):
            tied = overlapping([p for group in optimizer.param_groups for p in group["params"]])
            for plan, group in plans:
                plan.update(group, tied)
        for plan in self._plans:
            for chunk in plan.chunks:
                moved["state"] += chunk.collect_state(optimizer.state)
        if self.state_was_loaded:
            moved["state"] = 0
            self.state_was_loaded = False
        return moved

    def report(self) -> None:
        """Say which parameters could not be moved, once."""
        shared = sum(plan.shared for plan in self._plans)
        if shared and self._do_flatten:
            _logger.warning("fuse_optimizer leaves %d parameters where they are: %s", shared, _SHARED)

    def runs(self, optimizer: Optimizer) -> list[list[Run]]:
        """Return, for each parameter group, what can be stepped as one parameter now."""
        moved = self.gather(optimizer)
        key_of = _key_function(optimizer)
        runs = [[run for chunk in plan.chunks for run in chunk.runs(key_of)] for plan in self._plans]
        _attach([run for group_runs in runs for run in group_runs], optimizer)
        for plan in self._plans:
            for chunk in plan.chunks:
                moved["gradients"] += chunk.gradients.lost
                chunk.gradients.lost = 0
        if self._check_flatten:
            for cause, count in moved.items():
                if count:
                    _logger.warning(_WARNINGS[cause], count)
        return runs

    def after_step(self) -> None:
        """Take note that the optimizer has taken a step."""
        for plan in self._plans:
            for chunk in plan.chunks:
                chunk.after_step()


def _attach(runs: Sequence[Run], optimizer: Optimizer) -> None:
    try:
        for run in runs:
            run.attach(optimizer.state)
    except BaseException:  # such as a lack of memory
        for run in runs:
            optimizer.state.pop(run.flat, None)
        raise
    for run in runs:
        run.watch_gradient()


def _key_function(optimizer: Optimizer) -> Callable[[Tensor], Hashable]:
    """What parameters must have in common, besides the numbers in their state, to be stepped as one."""
    if isinstance(optimizer, QAdamOptimizer):
        handed_out = optimizer._handed_out
        return lambda p: p in handed_out
    return lambda p: None
