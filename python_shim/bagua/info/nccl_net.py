# SPDX-License-Identifier: Apache-2.0
"""Whether NCCL sends between hosts over bagua's transport: see docs/nccl_net.md."""

from __future__ import annotations

import os
from pathlib import Path

from bagua._native import _C


def path() -> Path:
    """Return the library that NCCL_NET_PLUGIN is to name."""
    return Path(_C.__file__).with_name("libnccl-net-bagua.so")


def in_use() -> str:
    """Return what carries CUDA tensors between hosts, by the environment of this process."""
    try:
        is_secret = bool(_C.job_secret_fingerprint())
    except (ValueError, NotImplementedError):
        is_secret = True
    chosen = os.environ.get("BAGUA_NCCL_NET") or ("1" if is_secret else "0")
    if is_secret and chosen == "0":
        return "nothing: a job secret is set, and BAGUA_NCCL_NET=0"
    plugin, net = os.environ.get("NCCL_NET_PLUGIN", ""), os.environ.get("NCCL_NET", "")
    is_ours = not plugin or (Path(plugin).exists() and path().samefile(plugin))
    is_allowed = is_ours and net.lower() in ("", "bagua")
    if chosen == "1":
        other = f"nothing: NET/bagua is to, and NCCL_NET={net!r}, NCCL_NET_PLUGIN={plugin!r} name another network"
        return "NET/bagua, for groups of backend 'bagua'" if is_allowed else other
    if plugin and is_allowed:
        return "NET/bagua, by NCCL_NET_PLUGIN"
    return "NCCL's own network (BAGUA_NCCL_NET=1 takes NET/bagua)"
