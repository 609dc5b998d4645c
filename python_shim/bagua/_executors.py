# SPDX-License-Identifier: Apache-2.0
"""Finds what runs a hook's programs.

That is the model's own group if it is ours. Otherwise a group of ours with the same ranks runs those of CPU tensors,
and executors over the other backend's operations run those of CUDA tensors.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua import _at_exit
from bagua._fresh_store import fresh_part, new_name
from bagua._native import _C
from bagua._registry import describe
from bagua._settings import warn_of_unknown
from bagua._tensors_apart import broadcast_state, gathered, to_cpu
from bagua._torch_private import backend_of, default_group, device_types, listed_groups, new_named_group, timeout_of


def _private_group(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, members: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Make a second group of the same ranks, or of `members` among them, for the hook alone. Collective among all.

    Its programs run beside the user's, in an order of their own; in one group they would meet in another order on each
    rank. For CPU tensors it is ours, whatever the backend of `group`; for CUDA tensors it is of the same backend.
    """
    name = "bagua" if device.type == "cpu" else dist.get_backend(group)
    if ":" in name:
        name = dict(pair.split(":") for pair in name.split(","))[device.type]
    everybody, changed = ranks_and_store(group)
    members = range(len(everybody)) if members is None else members
    ranks = [everybody[member] for member in members]
    options = None
    if changed is None:
        # Of several groups at once, each has its own part of the store.
        store = dist.PrefixStore(f"bagua_private_group/{ranks[0]}", group.get_group_store())
        unique = new_name(store, list(members).index(group.rank()), len(ranks), timeout)
    else:
        # By an operation, which ends when a member dies: whoever waits at a store does not hear of that.
        said = gathered((secrets.token_hex(16), _C.own_record()), group, device)
        unique = said[members[0]][0]
        options = _C.Options()
        options._records = [said[member][1] for member in members]
    return new_named_group(f"{group.group_name}_bagua_hook_{unique}", ranks, name, timeout, changed, options)


def _destroy(known: weakref.ref[dist.ProcessGroup]) -> None:
    # It may have been destroyed before, as all groups by `torch.distributed.destroy_process_group()`.
    group = known()
    if group is not None and group in listed_groups():
        dist.destroy_process_group(group)


def gathered_states(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the states of all ranks on the first one, and nothing on the others; tensors on the CPU. Collective.

    They travel in the memory of hosts: those of all ranks may fill a GPU.
    """
    own = to_cpu(own)
    everyones: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    cpu, types = torch.device("cpu"), device_types(group)
    has_cpu = cpu in types
    among = group if has_cpu else _private_group(group, cpu, timeout_of(backend_of(group, types[0])))
    try:
        dist.gather_object(own, everyones, group=among, group_dst=0)
    finally:
        if not has_cpu:
            dist.destroy_process_group(among)
    return everyones or []


def ranks_and_store(group: dist.ProcessGroup) -> tuple[list[int], dist.Store | None]:
    """Return the global ranks of a group, and the store in which they have met, if its members have changed.

    torch goes on listing the ranks that the group was made with.
    """
    backends = [backend_of(group, one) for one in device_types(group)]
    store = next(filter(None, (getattr(one, "reconfigured_store", None) for one in backends)), None)
    if store is None:
        return dist.get_process_group_ranks(group), None
    if group is not default_group():
        raise ValueError(
            f"the members of group {group.group_name!r} have changed, and torch knows the ranks of none of its groups "
            "but the default one then: a further group of them, such as an algorithm that runs in the background "
            "needs, can only be made of the members of the default group"
        )
    return list(range(group.size())), store


def _records_of(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> list[str]:
    """Return what each rank says of itself. Collective."""
    if not _C.job_secret_fingerprint():
        return gathered(_C.own_record(), group, device)
    rank, size = group.rank(), group.size()
    # What comes over another backend is of anybody: neither to be unpickled nor to be believed.
    store = fresh_part(dist.PrefixStore("bagua_records", group.get_group_store()), rank, size, timeout)
    store.set(str(rank), _C.own_record())
    store.wait([str(member) for member in range(size)], timeout)
    return [store.get(str(member)).decode() for member in range(size)]


def _executors_over(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, *, is_serial: bool = False
) -> Any:
    backend = backend_of(group, device)
    if isinstance(backend, _C.ProcessGroupBagua):
        # Read at the first program.
        if is_serial:
            backend.options._is_serial = True
        return _C.executors_of_group(backend)
    _at_exit.install()
    warn_of_unknown(group.rank())
    ranks = dist.get_process_group_ranks(group)
    records = _records_of(group, device, timeout)
    return _C.executors_over_backend(backend, group.group_name, records, timeout, ranks)


class _Use:
    """Lives as long as the executors over a group."""


def private_executors_for(
    group: dist.ProcessGroup,
    device: torch.device,
    members: Sequence[int] | None = None,
    *,
    is_serial: bool = False,
) -> Any:
    """Return executors over a group of their own, which ends with them. Collective, also among those left out of it.

    Their programs run beside those of `executors_for`, in an order of their own.

    Args:
        members: which of the ranks, such as those of one host; by default all.
        is_serial: whether programs never run beside each other, on one thread: several would take turns, each of which
            keeps the memory of the longest program.
    """
    use = _Use()
    timeout = timeout_of(backend_of(group, device))
    private = _private_group(group, device, timeout, members)
    # Else its threads stay until the process ends.
    weakref.finalize(use, _destroy, weakref.ref(private)).atexit = False
    return _C.with_owned(_executors_over(private, device, timeout, is_serial=is_serial), use)


def executors_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the C++ executors on which a hook for tensors on `device` runs its programs. Collective."""
    backend = backend_of(group, device)
    if device.type == "cpu" and not isinstance(backend, _C.ProcessGroupBagua):
        return private_executors_for(group, device)
    return _executors_over(group, device, timeout_of(backend))


# Made once for each group: with a backend other than "bagua" that makes another group.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Any]] = weakref.WeakKeyDictionary()


def shared_executors_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return executors for single operations, the same at every call. The first for a group is collective."""
    known = _known.setdefault(group, {})
    if device not in known:
        known[device] = executors_for(group, device)
    return known[device]


def arithmetic_of(device: torch.device) -> str:
    """Return what the bits of torch's products on a GPU depend on, besides the numbers. Empty on the CPU.

    cuBLAS chooses its kernels by the compute capability and the number of multiprocessors; TF32 rounds the factors. Our
    own products on the CPU give the same bits on every processor.
    """
    if device.type != "cuda":
        return ""
    gpu = torch.cuda.get_device_properties(device)
    return (
        f"compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
        f"torch {torch.__version__}, precision of float32 products {torch.backends.cuda.matmul.fp32_precision!r}"
    )


def start(hook: _C.Hook, group: dist.ProcessGroup, device: torch.device, parameters: str, optimizer: str) -> None:
    """Have the ranks agree on what they have given a hook, and make the groups that it needs besides. Collective.

    `parameters` and `optimizer` are texts that have to be the same on all ranks.
    """
    hook.agree(parameters, optimizer, str(device), arithmetic_of(device))
    _make_groups(hook, group, device)
    if describe(hook.name)["runs_in_background"]:
        _at_exit.end_with(group, hook)


def refuse(executors: Any, device: torch.device) -> None:
    """Tell the other ranks, which may have found nothing wrong and wait for this one, that it cannot go on."""
    # The caller's own error is what the user has to see, whatever becomes of this.
    with contextlib.suppress(Exception):
        _C.refuse_registration(executors, str(device))


def begin_again(hook: _C.Hook, group: dist.ProcessGroup, device: torch.device) -> None:
    """Have an algorithm that acts on weights go on among the members that its group has now. Collective."""
    furthest = hook.meet_again()
    hook.begin_again(broadcast_state(hook.shared() if group.rank() == furthest else None, furthest, group, device))
    _make_groups(hook, group, device)
    hook.end_change()


def _make_groups(hook: _C.Hook, group: dist.ProcessGroup, device: torch.device) -> None:
    if describe(hook.name)["runs_in_background"]:
        hook.use_background(private_executors_for(group, device, is_serial=True))
    if hook.host_ranks:
        hook.use_host(private_executors_for(group, device, hook.host_ranks))
