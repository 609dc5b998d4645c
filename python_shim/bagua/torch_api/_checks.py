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

    def as_many(self, name: str, given: Tensor, other_name: str, other: Tensor) -> None:
        """Both have the same dtype, device and number of elements."""
        if given.dtype != other.dtype or given.device != other.device:
            raise ValueError(
                f"{self.where}: {name} must be {other.dtype} on {other.device} as {other_name}, got {given.dtype} "
                f"on {given.device}"
            )
        if given.numel() != other.numel():
            raise ValueError(
                f"{self.where}: {name} must have {other.numel()} elements (as many as {other_name}), got "
                f"{given.numel()} of shape {tuple(given.shape)}"
            )

    def peer(self, name: str, given: Any) -> int:
        """Return `given` if it is a rank of the communicator."""
        if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < self.nranks:
            raise ValueError(
                f"{self.where}: {name} must be a rank of the communicator, 0 to {self.nranks - 1}, got {given!r}"
            )
        return given


def some(names: Sequence[str]) -> str:
    """Return the first few of these names, for a message.

    >>> some(["a", "b", "c", "d"])
    "'a', 'b', 'c', ..."
    """
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
