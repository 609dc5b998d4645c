# SPDX-License-Identifier: Apache-2.0
"""Makes the backend of one process group; torch calls this through `bagua_autoload`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bagua._native import _C

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import _DistributedBackendOptions


def _make_host_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Gloo, which moves the bytes of CPU tensors between hosts. GLOO_SOCKET_IFNAME chooses its network interface."""
    if not dist.is_gloo_available():
        raise RuntimeError(
            "backend 'bagua' moves CPU tensors between hosts with Gloo, which this torch was built without: "
            "install a torch from PyPI"
        )
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def create_backend(dist_backend_opts: _DistributedBackendOptions, pg_options: Any) -> Any:
    """Create the ProcessGroupBagua that torch asks for.

    Args:
        dist_backend_opts: store, rank, size and timeout of the group, from torch.
        pg_options: the user's `pg_options`: a `bagua.Options`, or None.
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
    options._timeout = dist_backend_opts.timeout
    options.group_name = dist_backend_opts.group_id
    options.global_ranks_in_group = list(dist_backend_opts.global_ranks_in_group)
    return _C.ProcessGroupBagua(
        dist_backend_opts.store,
        dist_backend_opts.group_rank,
        dist_backend_opts.group_size,
        options,
        _make_host_backend,
    )
