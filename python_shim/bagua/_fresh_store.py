# SPDX-License-Identifier: Apache-2.0
"""Part of a store in which nothing is left from an earlier life of the job.

torchrun starts killed ranks again, and the store of the agent may go on: addresses and errors of the ranks that are
gone would be found in it.
"""

from __future__ import annotations

import os

import torch.distributed as dist


def life() -> str:
    """Return what is the same on all ranks that torchrun has started together, and different after a restart."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def turn_of(store: dist.Store, key: str, size: int) -> int:
    """Count how often all of `size` ranks have come for `key` in this life. Each comes once for every turn."""
    # Of another size: torchrun goes on without a restart where the number of its hosts changes.
    return (store.add(f"turns/{life()}/{size}/{key}", 1) - 1) // size


def fresh_part(store: dist.Store, size: int) -> dist.Store:
    """Return a part of `store` for a new group of `size` ranks. Every rank of it calls this once."""
    return dist.PrefixStore(f"life/{life()}/{size}/{turn_of(store, 'group', size)}", store)
