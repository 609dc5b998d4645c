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
    plugin, net = os.environ.get("NCCL_NET_PLUGIN", ""), os.environ.get("NCCL_NET", "")
    if plugin and Path(plugin).exists() and path().samefile(plugin) and net.lower() in ("", "bagua"):
        return "NET/bagua, by NCCL_NET_PLUGIN"
    try:
        is_secret = bool(_C.job_secret_fingerprint())
    except (ValueError, NotImplementedError):
        is_secret = True
    chosen = os.environ.get("BAGUA_NCCL_NET") or ("1" if is_secret else "0")
    if chosen == "1":
        return "NET/bagua, for groups of backend 'bagua'"
    if is_secret:
        return "nothing: a job secret is set, and BAGUA_NCCL_NET=0"
    return "NCCL's own network (BAGUA_NCCL_NET=1 takes NET/bagua)"
