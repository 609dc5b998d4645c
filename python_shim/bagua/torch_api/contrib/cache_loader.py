# SPDX-License-Identifier: Apache-2.0
"""A cache of values that take long to make.

Definition: Bagua 0.9, whose default backend is "redis".
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from bagua.torch_api.contrib.utils.redis_store import RedisStore
from bagua.torch_api.contrib.utils.sqlite_store import SqliteStore
from bagua.torch_api.contrib.utils.store import Store

_BACKENDS: dict[str, Callable[..., Store]] = {"sqlite": SqliteStore, "redis": RedisStore}


class CacheLoader:
    """A mapping from keys to values, which are made at the first look-up and come from a store at later ones.

    Values are pickled: give it a store that only processes you trust can write to.

    Args:
        backend: "sqlite", a file that the processes of a host share and that needs no server
            (`bagua.torch_api.contrib.utils.sqlite_store.SqliteStore`), or "redis", servers that are running
            (`bagua.torch_api.contrib.utils.redis_store.RedisStore`).
        dataset_name: begins every key in the store, so that several loaders may share one.
        writer_buffer_size: how many values to collect before they are written. Those collected by a process are
            seen by others once they are written, at the latest when it ends.
        **kwargs: arguments of the store: `path` of "sqlite", `hosts` and `cluster_mode` of "redis".

    Raises:
        ValueError: an unknown backend, or less than 1 value to collect.

    >>> loader = CacheLoader(dataset_name="squares")
    >>> loader.get(3, lambda key: key * key)
    9
    >>> loader.get(3, lambda key: 1 / 0)
    9
    >>> loader.num_keys()
    1
    """

    def __init__(
        self, backend: str = "sqlite", dataset_name: str = "", writer_buffer_size: int = 1, **kwargs: Any
    ) -> None:
        if backend not in _BACKENDS:
            raise ValueError(f"CacheLoader: backend is to be one of {', '.join(_BACKENDS)}, got {backend!r}")
        if writer_buffer_size < 1:
            raise ValueError(f"CacheLoader: writer_buffer_size is to be 1 or more, got {writer_buffer_size}")
        self.backend = backend
        self.dataset_name = dataset_name
        self.store = _BACKENDS[backend](**kwargs)
        self._writer_buffer_size = writer_buffer_size
        self._unwritten: dict[str, bytes] = {}
        # The process that has been told to write the rest when it ends.
        self._writing_process = -1

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """Return the value of `key`; at the first time what `load_fn(key)` returns, a copy of which is stored.

        Keys are told apart by their `str()`.
        """
        cache_key = f"{self.dataset_name}_{key}"
        stored = self._unwritten.get(cache_key)
        if stored is None:
            stored = self.store.get(cache_key)
        if stored is not None:
            return pickle.loads(stored)
        value = load_fn(key)
        self._write(cache_key, pickle.dumps(value))
        return value

    def num_keys(self) -> int:
        """Return the number of keys in the store, those of other loaders included."""
        self.flush()
        return self.store.num_keys()

    def flush(self) -> None:
        """Write what has been collected."""
        if self._unwritten:
            self.store.mset(self._unwritten)
            self._unwritten.clear()

    def _write(self, cache_key: str, value: bytes) -> None:
        self._unwritten[cache_key] = value
        if len(self._unwritten) >= self._writer_buffer_size:
            self.flush()
        elif self._writing_process != os.getpid():
            self._writing_process = os.getpid()
            # Runs at the end of a DataLoader's worker, too, where atexit does not.
            Finalize(self, _flush_unwritten, (self.store, self._unwritten), exitpriority=1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_unwritten": {}, "_writing_process": -1}


def _flush_unwritten(store: Store, unwritten: dict[str, bytes]) -> None:
    if unwritten:
        store.mset(unwritten)
