# SPDX-License-Identifier: Apache-2.0
"""Process groups, the default one, of some ranks and over those of torch, and what collectives take as `comm`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from bagua._executors import ranks_and_store
from bagua._torch_private import backend_of, device_types, timeout_of
from bagua.torch_api.exceptions import RepeatedInitializationError


class CommMember(Enum):
    """What may stand in the place of a communicator."""

    WORLD = "all ranks of the default group"
    NON_COMM_MEMBER = "this process is not in the communicator: every operation returns at once and does nothing"


class Communicator:
    """Some ranks that communicate with each other. Ranks, roots and peers are positions INSIDE the communicator.

    `BaguaProcessGroup.get_global_communicator()` returns it. The original calls the class `BaguaSingleCommunicatorPy`.
    """

    def __init__(self, torch_group: dist.ProcessGroup) -> None:
        # torch keeps a group alive until it is destroyed; then we have to let it go, too.
        self._torch_group = weakref.ref(torch_group)
        # Of the group's members, when they were aborted.
        self._aborted_epoch: int | None = None

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The torch process group of these ranks. RuntimeError once it is destroyed."""
        group = self._torch_group()
        if group is None:
            raise RuntimeError("the torch process group of this bagua group was destroyed: make a new one")
        return group

    @property
    def _epoch(self) -> int:
        return getattr(_backend_of(self.torch_group), "epoch", 0)

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
        if not self.check_abort():
            self._aborted_epoch = self._epoch
            self.torch_group.abort()

    def check_abort(self) -> bool:
        """True if this rank has aborted the communicator, and its group has had the same members since."""
        if self._torch_group() is None:
            return self._aborted_epoch is not None
        return self._aborted_epoch == self._epoch

    def __repr__(self) -> str:
        group = self._torch_group()
        return "Communicator()" if group is None else f"Communicator(rank={group.rank()}, nranks={group.size()})"


Comm = Communicator | CommMember | None


class BaguaProcessGroup:
    """A torch process group, with a communicator of its ranks.

    Made by `init_process_group`, `new_group` and `from_torch_group`. It never waits for other ranks.
    """

    def __init__(self, torch_group: dist.ProcessGroup | None, ranks: Sequence[int], group_name: str = "") -> None:
        self._ranks = list(ranks)
        self.group_name = group_name
        self._communicator = CommMember.NON_COMM_MEMBER if torch_group is None else Communicator(torch_group)

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the members."""
        communicator = self._communicator
        group = communicator._torch_group() if isinstance(communicator, Communicator) else None
        if group is None or getattr(_backend_of(group), "reconfigured_store", None) is None:
            return self._ranks
        return ranks_and_store(group)[0]

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The torch process group. RuntimeError on ranks outside it, and once it is destroyed."""
        if not isinstance(self._communicator, Communicator):
            raise RuntimeError(f"rank {dist.get_rank()} is not in this group, which has the ranks {self.ranks}")
        return self._communicator.torch_group

    def get_global_communicator(self) -> Communicator | CommMember:
        """Return the communicator of all ranks of the group."""
        return self._communicator


# The groups live as long as torch's.
_groups_over: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = weakref.WeakKeyDictionary()
_default_torch_group: weakref.ref[dist.ProcessGroup] | None = None


def _backend_of(group: dist.ProcessGroup) -> Any:
    return backend_of(group, device_types(group)[0])


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backends = [backend_of(group, device) for device in device_types(group)]
    return next((timeout_of(backend) for backend in backends if hasattr(backend, "options")), dist.default_pg_timeout)


def init_process_group() -> None:
    """Initialise torch's default process group with backend "bagua" and make it bagua's: once, and first of all.

    Ranks meet as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, which torchrun sets. Where the default group of
    torch is initialised already, by whatever backend, that one is taken. It ends with
    `torch.distributed.destroy_process_group()`.

    Raises:
        RepeatedInitializationError: called a second time.
    """
    if is_initialized():
        raise RepeatedInitializationError(
            "init_process_group: trying to initialize the default process group twice! Once per process is enough"
        )
    if not dist.is_initialized():
        dist.init_process_group("bagua")
    group = dist.group.WORLD
    assert group is not None
    global _default_torch_group
    _default_torch_group = weakref.ref(group)
    from_torch_group(group)


def is_initialized() -> bool:
    """True after `init_process_group`, until torch's default group is destroyed."""
    return dist.is_initialized() and _default_torch_group is not None and _default_torch_group() is dist.group.WORLD


def default_group() -> BaguaProcessGroup:
    """Return the default group; RuntimeError before `init_process_group`."""
    group = dist.group.WORLD if is_initialized() else None
    if group is None:
        raise RuntimeError(
            "the default process group of bagua is not initialised: call bagua.torch_api.init_process_group() first "
            "(it takes over the default group of torch.distributed where there is one)"
        )
    return from_torch_group(group)


def new_group(ranks: Sequence[int] | None = None) -> BaguaProcessGroup:
    """Make a group of some ranks. All ranks of the default group have to call, in the same order.

    Args:
        ranks: global ranks, in any order; all by default.

    Returns:
        The group; on ranks outside it one whose communicator is `CommMember.NON_COMM_MEMBER`.

    Raises:
        ValueError: no rank, a rank named twice, or one that is no rank of the default group.
        RuntimeError: before `init_process_group`.
    """
    default = default_group()
    ranks = default.ranks if ranks is None else sorted(ranks)
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(default.ranks):
        raise ValueError(
            f"new_group on rank {dist.get_rank()}: ranks must be one or more of 0 to {len(default.ranks) - 1}, each "
            f"once, got {list(ranks)}"
        )
    made: Any = dist.new_group(ranks=list(ranks), timeout=_timeout_of(default.torch_group))
    return from_torch_group(made) if dist.get_rank() in ranks else BaguaProcessGroup(None, ranks)


def from_torch_group(group: dist.ProcessGroup | int | None) -> BaguaProcessGroup:
    """Return the bagua group over a torch group; the same one at every call. Waits for no other rank.

    Args:
        group: a torch group with ranks of the default group; None for torch's default group. What `dist.new_group`
            returns on ranks outside its group gives a group whose communicator is `CommMember.NON_COMM_MEMBER`.

    Raises:
        TypeError: `group` is no torch process group.
    """
    if group is None:
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return BaguaProcessGroup(None, [])
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"from_torch_group: group must be a torch.distributed.ProcessGroup, got {group!r}")
    if group not in _groups_over:
        _groups_over[group] = BaguaProcessGroup(group, dist.get_process_group_ranks(group), group.group_name)
    return _groups_over[group]


def bagua_group(group: dist.ProcessGroup | BaguaProcessGroup | None) -> BaguaProcessGroup:
    """Return the bagua group that is meant: the one given, the one over a group of torch, the default one for None."""
    if group is None:
        return default_group()
    return group if isinstance(group, BaguaProcessGroup) else from_torch_group(group)


def resolve(comm: Comm, operation: str) -> Communicator | None:
    """Return the communicator that is meant, None for that of others; RuntimeError before `init_process_group`."""
    if comm is None or comm is CommMember.WORLD:
        comm = default_group().get_global_communicator()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if not isinstance(comm, Communicator):
        raise TypeError(f"{operation}: comm must be a communicator of a BaguaProcessGroup, got {comm!r}")
    return comm
