# SPDX-License-Identifier: Apache-2.0
"""What happens to what the script has left at work when a process ends, or the groups that it needs.

In one place, since the order matters: algorithms end together with those of the other ranks while there are groups, and
then the groups are shut down. A forked child ends nothing of its parent's, only groups of its own.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bagua._native import _C
from bagua._torch_private import backend_of, device_types, listed_groups

_logger = logging.getLogger("bagua")
# A rank that ends this much later than the others finds them gone. More would keep a job alive of which one rank has
# called sys.exit(1), which cannot be told from a script's last line.
_LIMIT = timedelta(seconds=10)
# Algorithms that communicate in the background, each with its model's group and this rank. All ranks register them
# in the same order, and end them in that order.
_at_work: list[tuple[weakref.ref[_C.Hook], weakref.ref[dist.ProcessGroup], int]] = []
# Groups that torch does not list.
_unlisted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def end_with(group: dist.ProcessGroup, hook: _C.Hook) -> None:
    """Have an algorithm that runs in the background end when its group is destroyed, or the interpreter ends."""
    _at_work[:] = [one for one in _at_work if one[0]() is not None]
    _at_work.append((weakref.ref(hook), weakref.ref(group), dist.get_rank()))
    install()


def shut_down_with_process(group: dist.ProcessGroup) -> None:
    """Have a group end with the process though torch does not list it."""
    _unlisted.add(group)
    install()


@functools.cache
def install() -> None:
    atexit.register(_end)
    os.register_at_fork(after_in_child=_at_work.clear)


def _watch_destruction() -> None:
    """Have torch's `destroy_process_group` end the algorithms that need the group first.

    torch has no other moment for that: a backend hears of its end when the store's server, or a private group, may be
    gone already. Where a group ends because of an exception the other ranks are not at their end, and nobody is waited
    for.
    """
    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def end_and_destroy(group: Any = None) -> None:
        of = None if group is None or group is dist.group.WORLD else group
        if sys.exc_info()[0] is None:
            _end_algorithms(of, "its group was destroyed")
        else:
            _forget(of)
        destroy(group)

    distributed_c10d.destroy_process_group = end_and_destroy
    dist.destroy_process_group = end_and_destroy


def _end() -> None:
    # After an uncaught exception the other ranks are not at their end, and are to hear of it at once.
    try:
        if not hasattr(sys, "last_value"):
            # A script may have destroyed its groups by a name of torch's function that it had before this package.
            _end_algorithms(None, "the process ended" if dist.is_initialized() else "its group was destroyed")
    finally:
        _shut_down_groups()


def _end_algorithms(group: dist.ProcessGroup | None, moment: str) -> None:
    """End those of `group`, or all, and forget them."""
    for hook, rank in _forget(group):
        try:
            hook.end_within(_LIMIT)
        except RuntimeError as error:
            _logger.warning(
                "algorithm %r was still at work on rank %d when %s, and not all ranks ended with it: call "
                "handle.abort() on all ranks after the last step, or train inside `with handle:`. %s",
                hook.name,
                rank,
                moment,
                str(error).partition("\n")[0],
            )


def _forget(group: dist.ProcessGroup | None) -> list[tuple[_C.Hook, int]]:
    """Forget those of `group`, or all, and return them with this rank."""
    forgotten = [one for one in _at_work if group is None or one[1]() is group]
    _at_work[:] = [one for one in _at_work if one not in forgotten]
    return [(hook, rank) for known, _, rank in forgotten if (hook := known()) is not None]


def _shut_down_groups() -> None:
    """Shut down the groups that are left, and what runs hooks over groups of other backends, all at the same time.

    A communication thread that drops a tensor while the interpreter goes away would end the process by a signal.
    """
    groups = set()
    for group in {*listed_groups(), *_unlisted}:
        for device in device_types(group):
            try:
                backend = backend_of(group, device)
            except RuntimeError:  # a group whose making has failed has none
                continue
            if isinstance(backend, _C.ProcessGroupBagua):
                groups.add(backend)
    _C.shut_down_together(list(groups))


# It watches before there is an algorithm: a script may import the name before it registers one.
_watch_destruction()
