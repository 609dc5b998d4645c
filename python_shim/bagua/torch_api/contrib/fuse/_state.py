# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state of a chunk of parameters, as flat tensors and rows of numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bagua.torch_api.contrib.fuse._layout import Layout, owns_its_memory

State = dict[str, Any]
# Values without parts, which all parameters of a run may share.
_PLAIN = (int, float, str, NoneType, tuple)
# Labels of parameters without state, and with one that cannot be made flat.
_NEW = 0
_UNFIT = -1


class _Parts:
    """A tensor and the parts of it that the parameters have in their states."""

    def __init__(self, tensor: Tensor, views: list[Tensor]) -> None:
        self.tensor = tensor
        self._views = views
        # What goes into the states, where somebody may give the tensor itself other memory.
        self._parts = [view.detach() for view in views]

    def part(self, index: int) -> Tensor:
        """Return the part of one parameter."""
        if self._parts[index].data_ptr() != self._views[index].data_ptr():
            self._parts[index] = self._views[index].detach()
        return self._parts[index]


class _Row(_Parts):
    """A 0-dim state, such as the number of steps, of each parameter."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor, list(tensor.unbind()))
        self.version = -1


class _Held(NamedTuple):
    """What the state of one parameter consists of, as it was left after the last look at it."""

    tensors: list[tuple[str, Tensor, int]]  # name, tensor, address
    plain: tuple[str, ...]
    names: tuple[str, ...]


class FlatState:
    """Holds the tensors that `optimizer.state` of each parameter is made of.

    Parameters with equal numbers carry equal labels. Numbers on a GPU are compared only after somebody else may have
    changed them, for that means to wait for the GPU.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._flats: dict[str, _Parts] = {}
        self._rows: dict[str, _Row] = {}
        self._held: list[_Held | None] = [None] * len(layout)
        self._labels = [_NEW] * len(layout)
        self._last_label = _NEW

    def collect(self, states: Sequence[State | None]) -> int:
        """Move in whatever lies elsewhere. Returns how many parameters had lain here before."""
        elsewhere = [i for i, state in enumerate(states) if not self._is_in_place(i, state)]
        moved = sum(self._held[i] is not None for i in elsewhere)
        self.forget(elsewhere)
        if moved and not any(self._held):
            # All new, as after load_state_dict(): the types may differ too.
            self._flats.clear()
            self._rows.clear()
        for i in elsewhere:
            self._copy_out(states[i] or {})
        for i in elsewhere:
            self._take_in(i, states[i])
        if elsewhere or self._may_have_changed():
            self._label_all(states)
        return moved

    def forget(self, indices: Iterable[int]) -> None:
        """Take no notice of these any more."""
        for i in indices:
            self._held[i], self._labels[i] = None, _NEW

    def key(self, index: int, state: State | None) -> Hashable:
        """Return a value that is equal for parameters whose states can be one; None where there is none to be had."""
        held, label = self._held[index], self._labels[index]
        if label == _UNFIT:
            return None
        if held is None or state is None or not held.plain:
            return label
        return (label, *(state[name] for name in held.plain))

    def of_run(self, first: int, last: int, state: State | None) -> State:
        """Return the state of the parameters first..last (exclusive) as one; `state` is that of the first."""
        if not state:
            return {}
        start, end = self._layout.starts[first], self._layout.ends[last - 1]
        fused: State = {}
        for name, value in state.items():
            if name in self._flats and isinstance(value, Tensor) and value.dim() > 0:
                fused[name] = self._flats[name].tensor[start:end]
            else:
                fused[name] = value  # a number: that of the first parameter stands for all
        return fused

    def store(self, first: int, fused: State, states: Sequence[State], inputs: Iterable[Tensor]) -> None:
        """Give the parameters from `first` on, whose states are `states`, their parts of the state of the run."""
        last = first + len(states)
        plain = tuple(name for name, value in fused.items() if not isinstance(value, Tensor))
        for name, value in fused.items():
            if isinstance(value, Tensor):
                self._store(name, value, first, last, inputs)
        held = self._held[first]
        same_names = held is not None and held.names == tuple(fused)
        for i, state in enumerate(states, first):
            if same_names:
                state.update((name, fused[name]) for name in plain)
            else:
                self._hand_out(i, state, fused, plain)

    def restep(self, members: Iterable[int]) -> None:
        """Label these anew: their numbers have changed, all in the same way."""
        fresh: dict[int, int] = {}
        for i in members:
            if self._held[i] is None:
                continue
            if self._labels[i] not in fresh:
                self._last_label += 1
                fresh[self._labels[i]] = self._last_label
            self._labels[i] = fresh[self._labels[i]]
        for row in self._rows.values():
            row.version = row.tensor._version

    def _may_have_changed(self) -> bool:
        """Whether numbers were changed by somebody else, or may have become equal again in another number of steps."""
        rows = self._rows.values()
        if any(row.tensor._version != row.version for row in rows):
            return True
        labels = {label for label, held in zip(self._labels, self._held, strict=True) if held is not None}
        return len(labels) > 1 and all(row.tensor.device.type == "cpu" for row in rows)

    def _is_in_place(self, index: int, state: State | None) -> bool:
        held = self._held[index]
        if not state or held is None:
            return not state and held is None
        if len(state) != len(held.names):
            return False
        for name, tensor, address in held.tensors:
            # The tensor may have been given other memory.
            if state.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        return True

    def _copy_out(self, state: State) -> None:
        """Copy what already lies here, maybe in the place of another parameter, where it would be overwritten."""
        parts: list[_Parts] = [*self._flats.values(), *self._rows.values()]
        here = {part.tensor.untyped_storage().data_ptr() for part in parts}
        for name, value in state.items():
            is_strided = isinstance(value, Tensor) and value.layout == torch.strided
            if is_strided and value.untyped_storage().data_ptr() in here:
                state[name] = value.clone()

    def _take_in(self, index: int, state: State | None) -> None:
        if not state:
            return
        if not all(self._fits(index, name, value) for name, value in state.items()):
            self._labels[index] = _UNFIT
            return
        for name, value in state.items():
            if isinstance(value, Tensor):
                place = self._place(index, name, value)
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
                state[name] = place
        self._hold(index, state)

    def _fits(self, index: int, name: str, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return isinstance(value, _PLAIN)
        if value.layout != torch.strided or value.requires_grad or value.shape not in ((), self._layout.shapes[index]):
            return False
        known: _Parts | None = self._rows.get(name) if value.dim() == 0 else self._flats.get(name)
        if known is None:
            return name not in self._rows and name not in self._flats
        return (known.tensor.dtype, known.tensor.device) == (value.dtype, value.device)

    def _place(self, index: int, name: str, value: Tensor) -> Tensor:
        return (self._row(name, value) if value.dim() == 0 else self._flat(name, value)).part(index)

    def _row(self, name: str, like: Tensor) -> _Row:
        if name not in self._rows:
            self._rows[name] = _Row(torch.zeros(len(self._layout), dtype=like.dtype, device=like.device))
        return self._rows[name]

    def _flat(self, name: str, like: Tensor, buffer: Tensor | None = None) -> _Parts:
        if name not in self._flats:
            if buffer is None:
                buffer = self._layout.allocate(like)
            self._flats[name] = _Parts(buffer, self._layout.views(buffer))
        return self._flats[name]

    def _store(self, name: str, value: Tensor, first: int, last: int, inputs: Iterable[Tensor]) -> None:
        start, end = self._layout.starts[first], self._layout.ends[last - 1]
        if value.dim() == 0:
            row = self._row(name, value)
            done = value is row.part(first)
            row.tensor[first + done : last].fill_(value)
            return
        if value.shape != (end - start,):
            raise RuntimeError(
                f"the state {name!r} of a fused run of {end - start} elements has the shape {tuple(value.shape)}: an "
                "optimizer that keeps such a state cannot be fused"
            )
        is_new = name not in self._flats and value.numel() == self._layout.size and owns_its_memory(value)
        aliases = any(value.data_ptr() == tensor.data_ptr() for tensor in inputs)
        flat = self._flat(name, value, value if is_new and not aliases else None)
        place = flat.tensor[start:end]
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)

    def _hand_out(self, index: int, state: State, fused: State, plain: tuple[str, ...]) -> None:
        state.clear()
        for name, value in fused.items():
            state[name] = value if name in plain else self._place(index, name, value)
        self._hold(index, state)

    def _hold(self, index: int, state: State) -> None:
        tensors = [(n, value, value.data_ptr()) for n, value in state.items() if isinstance(value, Tensor)]
        plain = tuple(name for name, value in state.items() if not isinstance(value, Tensor))
        self._held[index] = _Held(tensors, plain, tuple(state))

    def _label_all(self, states: Sequence[State | None]) -> None:
        numbers = {name: row.tensor.tolist() for name, row in self._rows.items()}
        labels: dict[Hashable, int] = {}
        for i, state in enumerate(states):
            held = self._held[i]
            if held is None or state is None:
                continue
            kind = tuple((name, numbers[name][i] if tensor.dim() == 0 else None) for name, tensor, _ in held.tensors)
            signature = (kind, held.names)
            if signature not in labels:
                self._last_label += 1
                labels[signature] = self._last_label
            self._labels[i] = labels[signature]
        for row in self._rows.values():
            row.version = row.tensor._version
