# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# What torch's allocators give a tensor of its own. Matrix multiplication chooses its kernels, and thus its rounding, by
# the alignment of its operands: a weight that moves must not lose it.
_ALIGNMENT_BYTES = {"cpu": 64, "cuda": 512}


class Layout:
    """The places of several tensors in one flat tensor; each keeps its own shape and strides."""

    def __init__(self, tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
        self.starts = list(starts)
        self.ends = [start + tensor.numel() for start, tensor in zip(starts, tensors, strict=True)]
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [tensor.stride() for tensor in tensors]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        """The layout that tensors in one storage have already, from the first of them on."""
        offsets = [int(tensor.storage_offset()) for tensor in tensors]
        return cls(tensors, [offset - offsets[0] for offset in offsets])

    @classmethod
    def aligned(cls, tensors: Sequence[Tensor]) -> Layout:
        """One after the other, each as well aligned as one with memory of its own."""
        starts = [0]
        for tensor in tensors[:-1]:
            starts.append(_align(starts[-1] + tensor.numel(), tensor))
        return cls(tensors, starts)

    def allocate(self, like: Tensor) -> Tensor:
        """A new flat tensor. Of zeros, for the gaps between parameters take part in the arithmetic."""
        return torch.zeros(self.size, dtype=like.dtype, device=like.device)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return self.ends[-1]

    def view(self, flat: Tensor, index: int) -> Tensor:
        """One of the tensors, in the flat one."""
        start = flat.storage_offset() + self.starts[index]
        return flat.as_strided(self.shapes[index], self.strides[index], start)

    def views(self, flat: Tensor) -> list[Tensor]:
        """All of them."""
        return [self.view(flat, index) for index in range(len(self))]


def _align(offset: int, like: Tensor) -> int:
    step = _ALIGNMENT_BYTES[like.device.type] // like.element_size()
    return -(-offset // step) * step


class PaddedStorages:
    """Storages in which nothing lies in the gaps that alignment leaves.

    A second optimizer over parameters that were moved for a first one finds them there. Whether anything lies in the
    gaps of memory of other people nobody can tell.
    """

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> None:
        """Take note of the storage of this tensor."""
        self._known = {key: known for key, known in self._known.items() if not _is_gone(known)}
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __contains__(self, tensor: Tensor) -> bool:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and not _is_gone(known)


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, each place once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


def same_order(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two tensors of one shape have their elements in the same order (that of a size of 1 does not matter)."""
    return all(size == 1 or one == other for size, one, other in zip(shape, strides, others, strict=True))


def owns_its_memory(tensor: Tensor) -> bool:
    """Whether the tensor's storage holds this tensor and nothing else."""
    nbytes = tensor.numel() * tensor.element_size()
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == nbytes)


def _follows(one: Tensor, other: Tensor, padded: PaddedStorages | None) -> bool:
    # Two allocations may lie side by side by chance: it takes one storage.
    if one.dtype != other.dtype or one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    end = int(one.storage_offset()) + one.numel()
    start = int(other.storage_offset())
    return start == end or (padded is not None and start == _align(end, one) and one in padded)


def contiguous_runs(tensors: Sequence[Tensor], padded: PaddedStorages | None = None) -> list[list[int]]:
    """Return the indices of tensors that follow each other in one storage, two or more at a time.

    There are no gaps between them but those of alignment in storages that are `padded`.
    """
    runs: list[list[int]] = []
    for index in sorted(range(len(tensors)), key=lambda i: tensors[i].data_ptr()):
        if runs and _follows(tensors[runs[-1][-1]], tensors[index], padded):
            runs[-1].append(index)
        else:
            runs.append([index])
    return [run for run in runs if len(run) > 1]


def calculate_mutual_groups(tensors_list: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return the groups of indices whose tensors follow each other in memory in every one of several lists.

    A name of the original's module, where its tests used it. A group counts only where it is the same, whole, in all
    lists.

    Args:
        tensors_list: lists of the same length, such as the weights, the gradients and a state of the same parameters.

    Raises:
        ValueError: the lists differ in length.

    Example::

        >>> import torch
        >>> weights, gradients = torch.arange(6.0).split(2), torch.arange(6.0).split(2)
        >>> calculate_mutual_groups([weights, gradients])
        [[0, 1, 2]]
        >>> calculate_mutual_groups([weights, [gradients[2], torch.zeros(2), gradients[0]]])
        []
    """
    if len({len(tensors) for tensors in tensors_list}) > 1:
        raise ValueError(f"expected lists of one length, got {[len(tensors) for tensors in tensors_list]}")
    runs = [contiguous_runs(tensors) for tensors in tensors_list]
    return [run for run in runs[0] if all(run in others for others in runs)] if runs else []


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Return the `id()`s of the tensors that share memory with another one of the list."""
    found: set[int] = set()
    strided = [
        t for t in tensors if type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and t.numel()
    ]
    end, last = 0, None
    for tensor in sorted(strided, key=lambda t: (str(t.device), t.data_ptr())):
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        address = tensor.data_ptr()
        if last is not None and tensor.device == last.device and address < end:
            found |= {id(last), id(tensor)}
        if last is None or tensor.device != last.device or address + reach * tensor.element_size() > end:
            end, last = address + reach * tensor.element_size(), tensor
    return found
