# SPDX-License-Identifier: Apache-2.0
"""What the environment says of this process. Values are read at each call. Definition: Bagua 0.9."""

from __future__ import annotations

import os


def get_world_size() -> int:
    """Number of processes: WORLD_SIZE, by default 1."""
    return _integer("WORLD_SIZE", 1)


def get_rank() -> int:
    """Global rank of this process: RANK, by default 0."""
    return _integer("RANK", 0)


def get_local_rank() -> int:
    """Rank of this process on its host: LOCAL_RANK, by default 0."""
    return _integer("LOCAL_RANK", 0)


def get_local_size() -> int:
    """Number of processes on this host: LOCAL_WORLD_SIZE, by default 1."""
    return _integer("LOCAL_WORLD_SIZE", 1)


def get_default_bucket_size() -> int:
    """Bytes after which a bucket is closed: BAGUA_DEFAULT_BUCKET_SIZE, by default 10 MiB."""
    return _integer("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024**2)


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name)
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"environment variable {name} must be a whole number, got {text!r}") from None
