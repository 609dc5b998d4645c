# SPDX-License-Identifier: Apache-2.0
"""Parameters that lie one after another in memory, shown to an optimizer as one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bagua._torch_private import foreach_copy_, version_of

State = dict[str, Any]
States = dict[Tensor, State]


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a piece of memory, in row-major order or with channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.layout != torch.strided or tensor.dim() == 0 or tensor.numel() == 0:
        return False
    other = formats.get(tensor.dim())
    return tensor.is_contiguous() or (other is not None and tensor.is_contiguous(memory_format=other))


def flatten(parameters: Sequence[Parameter]) -> None:
    """Move parameters into one new piece of memory, without gaps. They keep identity, values, shapes and strides."""
    flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
    with torch.no_grad():
        for p, view in zip(parameters, _views(flat, parameters), strict=True):
            view.copy_(p)
            p.data = view


def contiguous_runs(parameters: Sequence[Parameter], most_bytes: float = math.inf) -> Iterator[list[Parameter]]:
    """Yield the parameters that follow each other in one storage, in the order of memory; two or more at a time."""
    dense = [p for p in parameters if is_dense(p)]
    run: list[Parameter] = []
    size: float = 0
    for p in sorted(dense, key=lambda p: (str(p.device), str(p.dtype), p.data_ptr())):
        size = size + p.nbytes if run and _follows(run[-1], p) else math.inf
        if size <= most_bytes and math.isfinite(size):
            run.append(p)
            continue
        if len(run) > 1:
            yield run
        run, size = [p], p.nbytes
    if len(run) > 1:
        yield run


def _follows(first: Tensor, second: Tensor) -> bool:
    return (
        first.data_ptr() + first.nbytes == second.data_ptr()
        # Two storages may meet by chance.
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and (first.dtype, first.device) == (second.dtype, second.device)
    )


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [p.numel() for p in parameters])
    return [piece.as_strided(p.shape, p.stride()) for piece, p in zip(pieces, parameters, strict=True)]


def state_key(parameter: Tensor, states: States) -> Hashable:
    """Return what parameters that are stepped as one have in common; None where the state cannot be laid side by side.

    Tensors of the shape of the parameter may differ. Numbers, and tensors that hold one, have to be equal.
    """
    key: list[Hashable] = []
    for name, value in sorted(states.get(parameter, {}).items()):
        if not isinstance(value, Tensor):
            if value is not None and not isinstance(value, bool | int | float):
                return None
            key.append((name, value))
        elif value.dim() == 0:
            key.append((name, value.dtype, value.device, value.item()))
        elif value.shape == parameter.shape and is_dense(value):
            key.append((name, value.dtype, value.device, "of the parameter's shape"))
        else:
            return None
    return tuple(key)


class Run:
    """Some parameters as one. Their state lies side by side too, and each keeps its part of it as its own."""

    def __init__(self, parameters: Sequence[Parameter], states: States) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0].detach()
        size = sum(p.numel() for p in self.parameters)
        self.flat = Parameter(first.as_strided((size,), (1,), first.storage_offset()), requires_grad=False)
        self._gradient: Tensor | None = None
        self._gradient_views: list[Tensor] = []
        self._state: State = {}
        # For each name the members' tensors, and for those of one number the vector that they lie in.
        self._parts: dict[str, list[Tensor]] = {}
        self._vectors: dict[str, tuple[Tensor, int]] = {}
        self._adopt(states)

    def is_intact(self, states: States) -> bool:
        """Return whether the state is where it was left, by identity, and its numbers are still equal."""
        members = [states.get(p, {}) for p in self.parameters]
        return (
            all(len(member) == len(self._state) for member in members)
            and all(
                member.get(name) is part
                for name, parts in self._parts.items()
                for member, part in zip(members, parts, strict=True)
            )
            and all(
                member.get(name) == value
                for name, value in self._state.items()
                if name not in self._parts
                for member in members
            )
            and all(version_of(vector) == version for vector, version in self._vectors.values())
        )

    def _adopt(self, states: States) -> None:
        """Lay the members' states side by side."""
        members = [states.get(p, {}) for p in self.parameters]
        for name, value in members[0].items():
            if not isinstance(value, Tensor):
                self._state[name] = value
                continue
            values = [member[name] for member in members]
            whole = value.new_empty(self.flat.shape) if value.dim() else value.clone()
            self._share(name, whole)
            with torch.no_grad():
                for part, own in zip(self._parts[name], values, strict=True):
                    part.copy_(own)
        self._hand_out(states)

    def _share(self, name: str, whole: Tensor) -> None:
        """Take a tensor of the flat parameter's state, and make each member's part of it."""
        self._state[name] = whole
        if whole.dim():
            self._parts[name] = _views(whole, self.parameters)
            return
        vector = whole.detach().repeat(len(self.parameters))
        self._parts[name] = list(vector.unbind())
        self._vectors[name] = (vector, version_of(vector))

    def _hand_out(self, states: States) -> None:
        for index, p in enumerate(self.parameters):
            own = {name: self._parts[name][index] if name in self._parts else v for name, v in self._state.items()}
            if own:
                states.setdefault(p, {}).update(own)

    def before_step(self, states: States) -> None:
        """Put gradient and state of the whole where the optimizer looks for them."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self._gradient is None:
            self._gradient = torch.empty_like(self.flat)
            self._gradient_views = _views(self._gradient, self.parameters)
        foreach_copy_(self._gradient_views, gradients)
        self.flat.grad = self._gradient
        if self._state:
            # The optimizer changes this copy, and after the step the two are compared.
            states[self.flat] = dict(self._state)

    def after_step(self, states: States) -> None:
        """Give each parameter its part of what has become of the whole's state."""
        self.flat.grad = None
        torch.autograd.graph.increment_version(self.parameters)
        state = states.pop(self.flat, {})
        has_same_tensors = state.keys() == self._state.keys() and all(
            state[name] is self._state[name] for name in self._parts
        )
        former, self._state = self._state, dict(state)
        if not has_same_tensors:
            self._parts, self._vectors = {}, {}
            for name, value in state.items():
                if isinstance(value, Tensor):
                    self._share(name, value)
        else:
            for name, (vector, _) in self._vectors.items():
                vector.copy_(self._state[name])
                self._vectors[name] = (vector, version_of(vector))
        if not has_same_tensors or any(former[name] != self._state[name] for name in state.keys() - self._parts):
            self._hand_out(states)
