# SPDX-License-Identifier: Apache-2.0
"""Makes the backend of one process group; torch calls this through `bagua_autoload`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bagua import _at_exit
from bagua._fresh_store import fresh_part
from bagua._native import _C
from bagua._settings import warn_of_unknown
from bagua._torch_private import set_timeout, uncount_group

if TYPE_CHECKING:
    from bagua._torch_private import BackendOptions


def _limited(timeout: timedelta, rank: int, size: int) -> timedelta:
    if timeout <= timedelta(0):
        # Above 2**63 microseconds torch's own conversion comes out negative.
        raise ValueError(
            f"bagua: rank {rank} of {size}: the timeout of a group must be positive, got "
            f"{timeout // timedelta(milliseconds=1)} ms. Beyond {timedelta(microseconds=2**63 - 1).days} days torch "
            f"cannot count; more than {_C.LONGEST_TIMEOUT.days} days are as good as none"
        )
    return min(timeout, _C.LONGEST_TIMEOUT)


def create_backend(dist_backend_opts: BackendOptions, pg_options: Any) -> Any:
    """Create the ProcessGroupBagua that torch asks for.

    Raises:
        TypeError: `pg_options` of another backend.
        ValueError: a timeout that is not positive, or settings that differ between the ranks.
    """
    if pg_options is None:
        options = _C.Options()
    elif isinstance(pg_options, _C.Options):
        # The user's object may serve several groups; each gets a timeout and ranks of its own.
        options = pg_options.__copy__()
    else:
        raise TypeError(
            f"backend 'bagua' takes pg_options of type bagua.Options, got {type(pg_options).__module__}."
            f"{type(pg_options).__qualname__}"
        )
    options.group_name = dist_backend_opts.group_id
    options.global_ranks_in_group = list(dist_backend_opts.global_ranks_in_group)
    _at_exit.install()
    rank, size = dist_backend_opts.group_rank, dist_backend_opts.group_size
    warn_of_unknown(rank)
    try:
        timeout = _limited(dist_backend_opts.timeout, rank, size)
        set_timeout(options, timeout)
        # A group made for one rank needs nobody: it is alone at once, so a model can be wrapped before others come.
        options._waits_for_reconfigure = getattr(dist_backend_opts, "enable_reconfigure", False) and size > 1
        # Members that are not known yet will meet at one of themselves, and those that have met have drawn a name.
        has_met = options._waits_for_reconfigure or options._records
        store = dist_backend_opts.store if has_met else fresh_part(dist_backend_opts.store, rank, size, timeout)
        return _C.ProcessGroupBagua(store, rank, size, options)
    except Exception:
        # Else this rank, when it tries again, would name the group differently from one that comes for the first time.
        uncount_group(dist_backend_opts.group_id)
        raise
