# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments before anything is communicated; errors name operation, rank, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.torch_api._communicators import Communicator
from bagua.torch_api._reduce_op import to_torch


class Checks:
    """The checks of one call of an operation on a communicator. `where` says which, and on which rank."""

    def __init__(self, operation: str, comm: Communicator) -> None:
        self.where = f"{operation} on rank {comm.rank()} of {comm.nranks()}"
        self.group = comm.torch_group
        self.rank = comm.rank()
        self.nranks = comm.nranks()
        # Of the tensors that were checked.
        self._devices: set[torch.device] = set()

    def tensor(self, name: str, given: Any) -> Tensor:
        """Return `given` if it is a dense tensor."""
        if not isinstance(given, Tensor):
            raise TypeError(f"{self.where}: {name} must be a tensor, got {type(given).__qualname__}")
        if given.layout != torch.strided:
            raise ValueError(f"{self.where}: {name} must be a dense tensor, got layout {given.layout}")
        self._devices.add(given.device)
        return given

    def wait(self) -> None:
        """Have the communication of the tensors be over for the host too, as in the original.

        On the CPU torch's operations block by themselves; on CUDA the host waits for the current stream.
        """
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def reduction(self, given: Any) -> Any:
        """Return torch's reduce operation for `given`."""
        return to_torch(given, self.where)

    def flat(self, name: str, given: Any) -> Tensor:
        """Return a one-dimensional view of `given`, which shares its memory."""
        tensor = self.tensor(name, given)
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.where}: {name} must be contiguous, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
        return tensor.detach().view(-1)

    def alike(self, name: str, given: Tensor, other_name: str, other: Tensor) -> None:
        """Both have the same dtype and device."""
        if given.dtype != other.dtype or given.device != other.device:
            raise ValueError(
                f"{self.where}: {name} must be {other.dtype} on {other.device} as {other_name}, got {given.dtype} "
                f"on {given.device}"
            )

    def elements(self, name: str, given: Tensor, expected: int, reason: str) -> None:
        """`given` has the expected number of elements."""
        if given.numel() != expected:
            raise ValueError(
                f"{self.where}: {name} must have {expected} elements ({reason}), got {given.numel()} of shape "
                f"{tuple(given.shape)}"
            )

    def as_many(self, name: str, given: Tensor, other_name: str, other: Tensor) -> None:
        """Both have the same dtype, device and number of elements."""
        self.alike(name, given, other_name, other)
        self.elements(name, given, other.numel(), f"as many as {other_name}")

    def multiple(self, name: str, given: Tensor, part_name: str, part: Tensor) -> None:
        """`given` is like `part`, with as many elements for each rank."""
        self.alike(name, given, part_name, part)
        self.elements(name, given, self.nranks * part.numel(), f"{self.nranks} x those of {part_name}")

    def chunk(self, name: str, given: Tensor) -> int:
        """Return how many elements of `given` there are for each rank."""
        if given.numel() % self.nranks != 0:
            raise ValueError(
                f"{self.where}: the number of elements of {name} must be a multiple of {self.nranks}, the number "
                f"of ranks, got {given.numel()} of shape {tuple(given.shape)}"
            )
        return given.numel() // self.nranks

    def count(self, name: str, given: Any) -> int:
        """Return `given` if it is a number of elements."""
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ValueError(f"{self.where}: {name} must be a number of elements, 0 or more, got {given!r}")
        return given

    def peer(self, name: str, given: Any) -> int:
        """Return `given` if it is a rank of the communicator."""
        if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < self.nranks:
            raise ValueError(
                f"{self.where}: {name} must be a rank of the communicator, 0 to {self.nranks - 1}, got {given!r}"
            )
        return given

    def other(self, name: str, given: Any) -> int:
        """Return `given` if it is another rank of the communicator."""
        if self.peer(name, given) == self.rank:
            raise ValueError(f"{self.where}: {name} must be another rank, got {given}")
        return int(given)

    def pieces(self, name: str, tensor: Tensor, counts: Any, displs: Any) -> list[Tensor]:
        """Return the views `tensor[displ : displ + count]`, one per rank; `tensor` is flat."""
        counts, displs = _numbers(counts), _numbers(displs)
        if len(counts) != self.nranks or len(displs) != self.nranks:
            raise ValueError(
                f"{self.where}: counts and displacements of {name} must be {self.nranks} numbers each, one per "
                f"rank, got {len(counts)} counts and {len(displs)} displacements"
            )
        for peer, (count, displ) in enumerate(zip(counts, displs, strict=True)):
            if count < 0 or displ < 0 or displ + count > tensor.numel():
                raise ValueError(
                    f"{self.where}: the piece of {name} for rank {peer} must lie within its {tensor.numel()} "
                    f"elements, got {count} from element {displ} on"
                )
        return [tensor[displ : displ + count] for count, displ in zip(counts, displs, strict=True)]

    def tensors(self, name: str, given: Any) -> list[Tensor]:
        """Return `given` as a list of dense tensors."""
        if isinstance(given, Tensor):
            raise TypeError(f"{self.where}: {name} must be a sequence of tensors, got a tensor")
        return [self.tensor(f"{name}[{index}]", tensor) for index, tensor in enumerate(given)]


def some(names: Sequence[str]) -> str:
    """Return the first few of these names, for a message.

    >>> some(["a", "b", "c", "d"])
    "'a', 'b', 'c', ..."
    """
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _numbers(given: Any) -> list[int]:
    return [int(one) for one in given]
