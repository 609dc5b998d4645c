# SPDX-License-Identifier: Apache-2.0
"""Communicators: what the collectives of `bagua.torch_api.communication` take as `comm`."""

from __future__ import annotations

import weakref
from enum import Enum

import torch
import torch.distributed as dist


class CommMember(Enum):
    """What may stand in the place of a communicator."""

    WORLD = "all ranks of the default group"
    NON_COMM_MEMBER = "this process is not in the communicator: every operation returns at once and does nothing"


class Communicator:
    """Some ranks that communicate with each other. Ranks, roots and peers are positions INSIDE the communicator.

    Made by the `get_..._communicator()` methods of a `BaguaProcessGroup`. The original calls the class
    `BaguaSingleCommunicatorPy`.
    """

    def __init__(self, torch_group: dist.ProcessGroup) -> None:
        # torch keeps a group alive until it is destroyed; then we have to let it go, too.
        self._torch_group = weakref.ref(torch_group)
        self._is_aborted = False

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The torch process group of these ranks. RuntimeError once it is destroyed."""
        return alive(self._torch_group)

    def rank(self) -> int:
        """This process's rank, from 0."""
        return self.torch_group.rank()

    def nranks(self) -> int:
        """The number of ranks."""
        return self.torch_group.size()

    def device_id(self) -> int:
        """The index of this process's current CUDA device; -1 where there is none."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def abort(self) -> None:
        """Fail what is in flight, on this rank and, once they notice, on its peers. Nothing can be communicated after.

        Callable from any thread; a second call does nothing.
        """
        if not self._is_aborted:
            self._is_aborted = True
            self.torch_group.abort()

    def check_abort(self) -> bool:
        """True if this rank has aborted the communicator."""
        return self._is_aborted

    def __repr__(self) -> str:
        group = self._torch_group()
        return "Communicator()" if group is None else f"Communicator(rank={group.rank()}, nranks={group.size()})"


Comm = Communicator | CommMember | None


def alive(torch_group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group, or raise RuntimeError because it has been destroyed."""
    group = torch_group()
    if group is None:
        raise RuntimeError("the torch process group of this bagua group was destroyed: make a new one")
    return group
