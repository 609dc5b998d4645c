# SPDX-License-Identifier: Apache-2.0
"""Process groups: the default one, groups of some ranks, and groups over those of torch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bagua._executors import ranks_and_store
from bagua._fresh_store import new_name
from bagua._named_groups import destroy_with, new_named_group
from bagua._native import _C
from bagua._torch_private import backend_of, device_types, timeout_of
from bagua.torch_api._communicators import Comm, CommMember, Communicator, alive
from bagua.torch_api.exceptions import RepeatedInitializationError


class BaguaProcessGroup:
    """A torch process group with communicators for all its ranks, for those of a host and for one of each host.

    Made by `init_process_group`, `new_group` and `from_torch_group`.

    `get_global_communicator()` never waits for other ranks. The other two make a torch group of the communicator's
    ranks at their first call. Every rank of that communicator has to make this call, no other needs to, and in any
    order; ranks outside get `CommMember.NON_COMM_MEMBER` at once. Where a peer never makes the call, an error is
    raised after the group's timeout. When the group has other members (torch's reconfigure), ask for them again.
    """

    def __init__(self, torch_group: dist.ProcessGroup | None, ranks: Sequence[int], group_name: str = "") -> None:
        self._ranks = list(ranks)
        self.group_name = group_name
        self._torch_group = None if torch_group is None else weakref.ref(torch_group)
        self._communicators: dict[str, Communicator | CommMember] = {}
        # Of the members that these are for.
        self._epoch = 0
        if torch_group is not None and _changed_store(torch_group) is None:
            store = _hosts_of(torch_group)
            store.set(str(torch_group.rank()), _C.local_host_id())

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the members."""
        group = None if self._torch_group is None else self._torch_group()
        if group is None or _changed_store(group) is None:
            return self._ranks
        return ranks_and_store(group, device_types(group)[0])[0]

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The torch process group. RuntimeError on ranks outside it, and once it is destroyed."""
        if self._torch_group is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not in this group, which has the ranks {self.ranks}")
        return alive(self._torch_group)

    def get_global_communicator(self) -> Communicator | CommMember:
        """Return the communicator of all ranks of the group."""
        return self._communicator("global")

    def get_inter_node_communicator(self) -> Communicator | CommMember:
        """Return the communicator of one rank per host: that of the group's lowest rank there."""
        return self._communicator("inter")

    def get_intra_node_communicator(self) -> Communicator | CommMember:
        """Return the communicator of the group's ranks on this host."""
        return self._communicator("intra")

    def _communicator(self, kind: str) -> Communicator | CommMember:
        if self._torch_group is None:
            return CommMember.NON_COMM_MEMBER
        group = self.torch_group
        epoch = getattr(backend_of(group, device_types(group)[0]), "epoch", 0)
        if epoch != self._epoch:
            self._communicators.clear()
            self._epoch = epoch
        if kind not in self._communicators:
            self._communicators[kind] = self._make_communicator(kind)
        return self._communicators[kind]

    def _make_communicator(self, kind: str) -> Communicator | CommMember:
        group = self.torch_group
        if kind == "global":
            return Communicator(group)
        ranks = self._ranks_in(kind)
        if group.rank() not in ranks:
            return CommMember.NON_COMM_MEMBER
        name = f"{group.group_name}_bagua_{kind}_{ranks[0]}"
        store = _changed_store(group)
        if store is not None:
            store = dist.PrefixStore(f"bagua_torch_api/{kind}/{ranks[0]}", store)
            name += f"_{new_name(store, ranks.index(group.rank()), len(ranks), _timeout_of(group))}"
        global_ranks = self.ranks
        made = new_named_group(
            name, [global_ranks[rank] for rank in ranks], dist.get_backend(group), _timeout_of(group), store
        )
        destroy_with(group, made)
        return Communicator(made)

    def _ranks_in(self, kind: str) -> list[int]:
        hosts = self._host_ids()
        if kind == "inter":
            return [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
        own = hosts[self.torch_group.rank()]
        return [rank for rank, host in enumerate(hosts) if host == own]

    def _host_ids(self) -> list[str]:
        group = self.torch_group
        changed = _changed_store(group)
        if changed is not None:
            return [_host_in(changed.get(f"host/{rank}").decode()) for rank in range(group.size())]
        store = _hosts_of(group)
        return [store.get(str(rank)).decode() for rank in range(group.size())]


# The groups live as long as torch's.
_groups_over: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = weakref.WeakKeyDictionary()
_default_torch_group: weakref.ref[dist.ProcessGroup] | None = None


def _changed_store(group: dist.ProcessGroup) -> dist.Store | None:
    """Return where the members have met, if they are not those that the group was made with."""
    store: dist.Store | None = getattr(backend_of(group, device_types(group)[0]), "reconfigured_store", None)
    return store


def _host_in(record: str) -> str:
    """Return the host that a rank has told the others when they met."""
    return next(line for line in record.splitlines() if line.startswith("host="))


def _hosts_of(group: dist.ProcessGroup) -> dist.Store:
    """Return where its ranks tell on which host they are. By the group's name: another's is not to be taken for it."""
    return dist.PrefixStore(f"bagua_torch_api/hosts/{group.group_name}", _C.sealed_store(group.get_group_store()))


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
        The group; on ranks outside it one whose communicators are `CommMember.NON_COMM_MEMBER`.

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
            returns on ranks outside its group gives a group whose communicators are `CommMember.NON_COMM_MEMBER`.

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
