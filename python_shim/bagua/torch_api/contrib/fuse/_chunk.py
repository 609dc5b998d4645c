# SPDX-License-Identifier: Apache-2.0
"""Parameters that lie in one piece of memory, and the runs of them that a step may take for one parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from bagua.torch_api.contrib.fuse._gradients import FlatGradients
from bagua.torch_api.contrib.fuse._layout import Layout, same_order
from bagua.torch_api.contrib.fuse._state import FlatState, State

States = dict[Tensor, State]

# A step is a row of passes over a run. On the CPU they should find in the cache what the pass before has written, as
# those over a single parameter do.
_CPU_RUN_BYTES = 4 << 20


class Run:
    """Neighbours in a chunk that take the coming step as one parameter."""

    def __init__(self, chunk: Chunk, first: int, last: int) -> None:
        self.parameters = chunk.parameters[first:last]
        self._chunk = chunk
        self._first, self._last = first, last
        # The weights, with their gradient: what the optimizer gets to see.
        self.flat = torch.nn.Parameter(
            chunk.weights[chunk.layout.starts[first] : chunk.layout.ends[last - 1]], requires_grad=False
        )
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._version = 0

    def attach(self, states: States) -> None:
        """Put gradient and state of the run where the optimizer will look for them."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.flat.grad, self._copied = self._chunk.gradients.flat(self._first, gradients)
        state = self._chunk.state.of_run(self._first, self._last, states.get(self.parameters[0]))
        if state:
            states[self.flat] = state

    def watch_gradient(self) -> None:
        """Have `detach` notice whether the optimizer changes the gradient; when all runs have theirs."""
        assert self.flat.grad is not None
        self._version = self.flat.grad._version

    def detach(self, states: States, state: State | None) -> None:
        """Give each parameter its part of what has become of the run, whose state is now `state`."""
        gradient = self.flat.grad
        assert gradient is not None
        if state is not None:
            members = [states.setdefault(p, {}) for p in self.parameters]
            self._chunk.state.store(self._first, state, members, (self.flat, gradient))
        if self._copied and gradient._version != self._version:
            # The optimizer has changed the gradients, for instance divided them by GradScaler's scale.
            torch._foreach_copy_([original for _, original in self._copied], [copy for copy, _ in self._copied])
        self.flat.grad = None
        # Autograd has to know, as after every change in place.
        torch.autograd.graph.increment_version(self.parameters)


class Chunk:
    """Parameters of one group, dtype and device in one piece of memory."""

    def __init__(self, parameters: Sequence[Tensor], layout: Layout, weights: Tensor, *, is_ours: bool) -> None:
        self.parameters = list(parameters)
        self.layout = layout
        self.weights = weights
        # Whether the memory was made for the chunk; else the parameters were found in it.
        self.is_ours = is_ours
        self.state = FlatState(layout)
        self.gradients = FlatGradients(layout, weights)
        self._addresses = [p.data_ptr() for p in self.parameters]
        self._members = set(range(len(self.parameters)))
        self._stepped: list[int] = []
        self._states: list[State | None] = []

    @classmethod
    def move(cls, parameters: Sequence[Tensor]) -> Chunk:
        """Move parameters into memory of their own; they keep their identity, values, shapes and strides."""
        layout = Layout.aligned(parameters)
        weights = layout.allocate(parameters[0])
        for parameter, view in zip(parameters, layout.views(weights), strict=True):
            view.copy_(parameter)
            parameter.data = view
        return cls(parameters, layout, weights, is_ours=True)

    @classmethod
    def find(cls, parameters: Sequence[Tensor]) -> Chunk:
        """Take parameters that follow each other in memory already."""
        layout = Layout.of(parameters)
        first = parameters[0].detach()
        weights = first.as_strided((layout.size,), (1,), first.storage_offset())
        return cls(parameters, layout, weights, is_ours=False)

    @property
    def members(self) -> list[Tensor]:
        """The parameters that are still here."""
        return [self.parameters[i] for i in sorted(self._members)]

    def displaced(self) -> list[int]:
        """Return the indices of members whose weights are no longer in this memory."""
        found = []
        for i in self._members:
            p = self.parameters[i]
            if (
                p.data_ptr() != self._addresses[i]
                or p.stride() != self.layout.strides[i]
                or p.shape != self.layout.shapes[i]
            ):
                found.append(i)
        return found

    def take_back(self, index: int) -> bool:
        """Move a member's weights back to their place, if they still fit it."""
        p = self.parameters[index]
        is_like = (p.dtype, p.device) == (self.weights.dtype, self.weights.device)
        if not is_like or p.shape != self.layout.shapes[index] or p.stride() != self.layout.strides[index]:
            return False
        view = self.layout.view(self.weights, index)
        view.copy_(p)
        p.data = view
        return True

    def keep(self, ids: set[int]) -> None:
        """Give up the members whose `id()` is not among these."""
        gone = {i for i in self._members if id(self.parameters[i]) not in ids}
        self._members -= gone
        self.state.forget(gone)

    def collect_state(self, states: States) -> int:
        """Move the optimizer's state of the members here; returns how many had it here before."""
        members = self._members
        self._states = [states.get(p) if i in members else None for i, p in enumerate(self.parameters)]
        return self.state.collect(self._states)

    def runs(self, key_of: Callable[[Tensor], Hashable]) -> list[Run]:
        """Return the runs of two or more neighbours that have a gradient and the same numbers in their state.

        To be called after `collect_state`.
        """
        found: list[Run] = []
        self._stepped = [i for i in self._members if self.parameters[i].grad is not None]
        is_cpu = self.weights.device.type == "cpu"
        limit = (_CPU_RUN_BYTES if is_cpu else sys.maxsize) // self.weights.element_size()
        first, current = 0, None
        for i in range(len(self.parameters) + 1):
            key = self._key(i, key_of) if i in self._members else None
            if key is not None and key == current and self.layout.ends[i] - self.layout.starts[first] <= limit:
                continue
            if current is not None and i - first > 1:
                found.append(Run(self, first, i))
            first, current = i, key
        return found

    def after_step(self) -> None:
        """Take note that all members that had a gradient have taken one step."""
        self.state.restep(self._stepped)

    def _key(self, index: int, key_of: Callable[[Tensor], Hashable]) -> Hashable:
        p = self.parameters[index]
        if not self._is_usable(p.grad, index):
            return None
        key = self.state.key(index, self._states[index])
        return None if key is None else (key, key_of(p))

    def _is_usable(self, gradient: Tensor | None, index: int) -> bool:
        """Whether there is a gradient, with its elements in the order of the weights."""
        if gradient is None or type(gradient) is not Tensor or gradient.layout != torch.strided:
            return False
        strides = self.layout.strides[index]
        return gradient.dtype == self.weights.dtype and (
            gradient.stride() == strides or same_order(self.layout.shapes[index], strides, gradient.stride())
        )
