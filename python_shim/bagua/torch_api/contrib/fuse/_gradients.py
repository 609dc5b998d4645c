# SPDX-License-Identifier: Apache-2.0
"""The gradients of a chunk of parameters as one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from bagua.torch_api.contrib.fuse._layout import Layout, owns_its_memory


class FlatGradients:
    """Brings gradients into one buffer.

    `zero_grad(set_to_none=True)`, torch's default, has autograd make new gradients in each step: those are copied into
    the buffer. Gradients that are kept from step to step are moved into it, and from then on autograd writes there.
    Gradients that are part of something larger, such as a bucket of DistributedDataParallel, stay where they are.
    """

    def __init__(self, layout: Layout, like: Tensor) -> None:
        self._layout = layout
        self._like = like
        self._views: list[Tensor] = []
        self._addresses: list[int] = []
        self._buffer: Tensor | None = None
        # Of parameters whose gradient lives in the buffer.
        self._moved_in: set[int] = set()
        self._may_move = True
        # The first gradient of each run of the step before.
        self._watched: dict[int, TensorWeakRef] = {}
        # Gradients that had been moved into the buffer and were found elsewhere.
        self.lost = 0

    def flat(self, first: int, gradients: Sequence[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the gradients of the parameters from `first` on as one tensor, and the pairs (copy, original)."""
        if (elsewhere := self._adjacent_elsewhere(first, gradients)) is not None:
            return elsewhere, []
        missing = self._missing(first, gradients)
        lost = [i for i, _ in missing if i in self._moved_in]
        if lost:
            self.lost += len(lost)
            self._moved_in.clear()
            # Whoever replaced the gradients may still hold the old ones, which have to keep their values.
            self._may_move, self._buffer = False, None
        if self._buffer is None:
            self._allocate()
            missing = list(enumerate(gradients, first))
        copies = [self._views[i] for i, _ in missing]
        originals = [gradient for _, gradient in missing]
        if missing:
            torch._foreach_copy_(copies, originals)
        buffer = self._buffer
        assert buffer is not None
        flat = buffer[self._layout.starts[first] : self._layout.ends[first + len(gradients) - 1]]
        if self._move_in(missing):
            return flat, []
        return flat, list(zip(copies, originals, strict=True))

    def _allocate(self) -> None:
        self._buffer = self._layout.allocate(self._like)
        self._views = self._layout.views(self._buffer)
        self._addresses = [view.data_ptr() for view in self._views]

    def _missing(self, first: int, gradients: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        if self._buffer is None:
            return list(enumerate(gradients, first))
        return [(i, g) for i, g in enumerate(gradients, first) if g.data_ptr() != self._addresses[i]]

    def _adjacent_elsewhere(self, first: int, gradients: Sequence[Tensor]) -> Tensor | None:
        """The gradients, if they lie side by side in memory of somebody else."""
        address, size = gradients[0].data_ptr(), gradients[0].element_size()
        if self._buffer is not None and address == self._addresses[first]:
            return None
        layout = self._layout
        for i, gradient in enumerate(gradients, first):
            # Without gaps, for what lies in them is not ours.
            if gradient.data_ptr() != address or (i > first and layout.starts[i] != layout.ends[i - 1]):
                return None
            address += gradient.numel() * size
        storage = gradients[0].untyped_storage()
        # Two allocations may lie side by side by chance.
        if address > storage.data_ptr() + storage.nbytes():
            return None
        numel = layout.ends[first + len(gradients) - 1] - layout.starts[first]
        return gradients[0].detach().as_strided((numel,), (1,), gradients[0].storage_offset())

    def _move_in(self, missing: Sequence[tuple[int, Tensor]]) -> bool:
        """Have the gradients live in the buffer, if they are of the kind that is kept from step to step."""
        if not missing or not self._may_move:
            return False
        index, gradient = missing[0]
        watched = self._watched.get(index)
        self._watched[index] = TensorWeakRef(gradient)
        # The others follow the first: zero_grad() does the same to all.
        was_kept = watched is not None and watched() is gradient
        if not was_kept and not self._moved_in:
            return False
        if not all(_is_movable(g) for _, g in missing):
            self._may_move = False
            return False
        for i, g in missing:
            # The tensor stays the same object, so that whoever holds it sees what comes next.
            g.data = self._views[i]
            self._moved_in.add(i)
        return True


def _is_movable(gradient: Tensor) -> bool:
    return not gradient._is_view() and not gradient.requires_grad and owns_its_memory(gradient)
