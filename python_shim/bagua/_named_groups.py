# SPDX-License-Identifier: Apache-2.0
"""Torch process groups that only their own ranks have to make."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from bagua._torch_private import default_group, listed_groups, new_listed_group


def new_named_group(
    name: str,
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta,
    store: dist.Store | None = None,
    options: object = None,
) -> dist.ProcessGroup:
    """Make a process group of `ranks`. Each of them has to call, with the same arguments, and no other needs to.

    `torch.distributed.new_group` needs a call of every rank. With `use_local_synchronization=True` it does not, but the
    ranks that call then count one group more than the others, and groups made later get other names on some ranks than
    on the rest and never form (seen with torch 2.15; 2.11 counts otherwise, to a similar effect). Here the caller
    chooses the name, and nothing is counted.

    Args:
        name: unique among the groups of this process, the same on all of `ranks`.
        ranks: global ranks, ascending.
        store: where they meet; without it, in the default group's.
        options: of the backend.
    """
    world = default_group()
    # Else torch splits a group that is bound to a device: all ranks would have to take part in that.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return new_listed_group(ranks, backend, name, timeout, store, options)
    finally:
        world.bound_device_id = device


def destroy_with(owner: object, group: dist.ProcessGroup) -> None:
    """Destroy a group that was made for `owner` when that is gone: else its threads stay until the process ends.

    It may have been destroyed before, as with all groups by `torch.distributed.destroy_process_group()`.
    """
    weakref.finalize(owner, _destroy, weakref.ref(group)).atexit = False


def _destroy(known: weakref.ref[dist.ProcessGroup]) -> None:
    group = known()
    if group is not None and group in listed_groups():
        dist.destroy_process_group(group)
