# SPDX-License-Identifier: Apache-2.0
"""Tensors that travel together, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bagua._executors import shared_executors_for
from bagua._native import _C
from bagua.torch_api.tensor import as_bagua

if TYPE_CHECKING:
    from bagua.torch_api.communication import BaguaProcessGroup


class Operation(NamedTuple):
    """What is done to a bucket, the same on every rank.

    Attributes:
        start: begins it, and returns None if it is done already. It takes the bucket and the model's executors, which
            are for operations without a group of their own.
        runs_python: whether `start` does the work itself and has to run on the model's thread.
        group: the ranks that take part; None: the model's.
    """

    start: Callable[[BaguaBucket, Any], dist.Work | None]
    runs_python: bool = False
    group: BaguaProcessGroup | None = None


class BaguaBucket:
    """Tensors that are communicated together, by a list of operations.

    Args:
        tensors: Bagua tensors, all of one dtype and device.
        name: unique within the model.
        flatten: whether the effective tensors are moved into one contiguous memory (else they are copied there and back
            for each communication).
        alignment: the number of elements becomes a multiple of it, by a tensor of zeros at the end. The built-in
            operations need none.

    >>> tensors = [torch.ones(3), torch.full((2,), 5.0)]
    >>> bucket = BaguaBucket(tensors, name="example", flatten=True, alignment=4)
    >>> bucket.flattened_tensor()
    tensor([1., 1., 1., 5., 5., 0., 0., 0.])
    >>> bucket.check_flatten(), bucket.bytes()
    (True, 20)
    """

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        if not tensors:
            raise ValueError(f"bucket {name!r} has no tensor")
        if len(set(tensors)) < len(tensors):
            raise ValueError(f"bucket {name!r} has a tensor twice")
        for tensor in tensors:
            if as_bagua(tensor).is_bagua_tensor() and as_bagua(tensor).bagua_getter_closure() is None:
                as_bagua(tensor).bagua_ensure_grad()
        effective = [as_bagua(tensor).bagua_getter_closure() for tensor in tensors]
        kinds: set[tuple[torch.dtype, torch.device]] = {(tensor.dtype, tensor.device) for tensor in effective}
        if len(kinds) > 1:
            raise ValueError(f"tensors of bucket {name!r} are not of one dtype and device: {kinds}")
        self.tensors = list(tensors)
        self.name = name
        self.flatten = flatten
        self.operations: list[Operation] = []
        self._offsets = [0]
        for tensor in effective:
            self._offsets.append(self._offsets[-1] + tensor.numel())
        # Those of the effective tensors where they leave no gaps (channels_last), else contiguous.
        self._shapes = [tensor.shape for tensor in effective]
        self._strides = [torch.empty_like(tensor, device="meta").stride() for tensor in effective]
        padding = -self._offsets[-1] % alignment
        dtype, device = kinds.pop()
        self.padding_tensor: Tensor | None = torch.zeros(padding, dtype=dtype, device=device) if padding else None
        # The effective tensors, one after another.
        self.backend_tensor: Tensor = torch.zeros(self._offsets[-1] + padding, dtype=dtype, device=device)
        for index in range(len(self.tensors)):
            self.gather_at(index)
        if flatten and padding:
            self.padding_tensor = self.backend_tensor.narrow(0, self._offsets[-1], padding)

    def slot_at(self, index: int) -> Tensor:
        """Return the place of one of the tensors in `backend_tensor`, with its shape."""
        begin, end = self._offsets[index : index + 2]
        return self.backend_tensor.narrow(0, begin, end - begin).as_strided(self._shapes[index], self._strides[index])

    @torch.no_grad()
    def gather_at(self, index: int) -> None:
        """Bring the effective tensor's values into place, where it does not lie there anyway."""
        tensor = self.tensors[index]
        effective, slot = as_bagua(tensor).bagua_getter_closure(), self.slot_at(index)
        if effective is None:
            name = as_bagua(tensor).bagua_tensor_name
            raise RuntimeError(f"tensor {name!r} of bucket {self.name!r} has nothing to communicate: is it a gradient?")
        if effective.is_sparse:
            raise NotImplementedError(f"bucket {self.name!r}: sparse tensors cannot be communicated in a bucket")
        if not _is_same_memory(effective, slot):
            slot.copy_(effective)
            if self.flatten:
                as_bagua(tensor).bagua_setter_closure(slot)

    @torch.no_grad()
    def scatter_back(self) -> None:
        """Bring the values back to the effective tensors that lie elsewhere."""
        for index, tensor in enumerate(self.tensors):
            effective, slot = as_bagua(tensor).bagua_getter_closure(), self.slot_at(index)
            if effective is not None and not _is_same_memory(effective, slot):
                effective.copy_(slot)

    def flattened_tensor(self) -> Tensor:
        """Return a copy of the effective tensors as one, with the padding."""
        copy = torch.zeros_like(self.backend_tensor)
        for index, tensor in enumerate(self.tensors):
            slot = self.slot_at(index)
            place = copy.as_strided(slot.shape, slot.stride(), self._offsets[index])
            place.copy_(as_bagua(tensor).bagua_getter_closure().detach())
        return copy

    def check_flatten(self) -> bool:
        """Return whether the effective tensors lie one after another in memory."""
        effective = (as_bagua(tensor).bagua_getter_closure() for tensor in self.tensors)
        return all(_is_same_memory(tensor, self.slot_at(index)) for index, tensor in enumerate(effective))

    def bytes(self) -> int:
        """Return the size of the effective tensors in bytes, without padding."""
        size: int = self._offsets[-1] * self.backend_tensor.element_size()
        return size

    def clear_ops(self) -> BaguaBucket:
        """Drop all operations."""
        self.operations.clear()
        return self

    def append_operation(self, operation: Operation) -> BaguaBucket:
        """Add an operation after those that are there."""
        self.operations.append(operation)
        return self

    def append_python_op(
        self, python_function: Callable[[str], Any], group: BaguaProcessGroup | None = None
    ) -> BaguaBucket:
        """Append a function that takes the bucket's name.

        It runs on a thread of the model's own, in the order of buckets and operations, with the effects of the
        operations before it complete.
        """

        def start(bucket: BaguaBucket, executors: Any) -> None:
            python_function(bucket.name)

        return self.append_operation(Operation(start, runs_python=True))

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> BaguaBucket:
        """Append the mean (or sum) over the ranks of the group.

        Args:
            hierarchical: with compression: full precision inside a host.
            average: mean; False: sum.
            scattergather: accepted for compatibility; the result is the same.
            compression: None, or "MinMaxUInt8" for 8-bit messages.
            group: the ranks that take part; by default the model's.
        """
        if compression not in (None, "MinMaxUInt8"):
            raise ValueError(f"compression must be None or 'MinMaxUInt8', got {compression!r}")

        def start(bucket: BaguaBucket, executors: Any) -> dist.Work:
            if group is not None:
                executors = shared_executors_for(group.torch_group, bucket.backend_tensor.device)
            return _C.reduce_flat(executors, bucket.backend_tensor, hierarchical, average, compression is not None)

        return self.append_operation(Operation(start, group=group))

    @property
    def has_python_ops(self) -> bool:
        """Whether any operation runs Python code."""
        return any(operation.runs_python for operation in self.operations)

    def __repr__(self) -> str:
        names = ", ".join(repr(getattr(tensor, "bagua_tensor_name", "")) for tensor in self.tensors)
        return f"<BaguaBucket {self.name!r} of {names}>"


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
