# SPDX-License-Identifier: Apache-2.0
"""Finds what runs a hook's programs: the model's own group if it is ours, else a group of another backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua._fresh_store import life, turn_of
from bagua._named_groups import new_named_group
from bagua._native import _C


def _unwrapped(backend: Any) -> Any:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checking wrapper around every backend."""
    return getattr(backend, "wrapped_pg", backend)


def _timeout_of(backend: Any) -> timedelta:
    # Not every backend shows its options to Python.
    options = getattr(backend, "options", None)
    return options._timeout if options is not None else dist.default_pg_timeout


def _private_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """Make a second group of the same ranks and backend, for the hook alone.

    Its programs run beside the user's, in an order of their own; in one group they would meet in another order on each
    rank.
    """
    name = dist.get_backend(group)
    if ":" in name:
        name = dict(pair.split(":") for pair in name.split(","))[device.type]
    ranks = dist.get_process_group_ranks(group)
    # Every rank comes once for each private group, and waits for the others before it comes for the next.
    number = turn_of(group.get_group_store(), "bagua_private_group", len(ranks))
    return new_named_group(f"{group.group_name}_bagua_hook_{life()}_{number}", ranks, name, timeout)


def _executors_over(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Any:
    backend = _unwrapped(group._get_backend(device))
    if isinstance(backend, _C.ProcessGroupBagua):
        return _C.executors_of_group(backend)
    host_ids: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(host_ids, _C.local_host_id(), group=group)
    # A group for CPU tensors is the hook's own, and so is its store. NCCL has a watchdog itself.
    store = group.get_group_store() if device.type == "cpu" else None
    ranks = dist.get_process_group_ranks(group)
    return _C.executors_over_backend(backend, group.group_name, host_ids, timeout, store, ranks)


def executors_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the C++ executors on which a hook for tensors on `device` runs its programs. Collective."""
    backend = _unwrapped(group._get_backend(device))
    timeout = _timeout_of(backend)
    if device.type == "cpu" and not isinstance(backend, _C.ProcessGroupBagua):
        group = _private_group(group, device, timeout)
    return _executors_over(group, device, timeout)


def background_executors_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return executors whose programs run beside those of `executors_for`, in an order of their own. Collective."""
    timeout = _timeout_of(_unwrapped(group._get_backend(device)))
    return _executors_over(_private_group(group, device, timeout), device, timeout)
