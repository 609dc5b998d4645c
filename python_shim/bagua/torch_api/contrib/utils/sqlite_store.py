# SPDX-License-Identifier: Apache-2.0
"""A store in a file, which needs no server.

SQLite, of the standard library, and not the other means at hand: torch's FileStore keeps all values in the memory of
every process and waits for a key that is missing, HashStore is not shared with other processes, TCPStore and Redis need
a server, and shelve allows one writer at a time with no locking. SQLite serves many processes of a host, waits for the
writer itself, and a process that dies leaves the file whole.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.torch_api.contrib.utils.store import Store

_logger = logging.getLogger("bagua")

_FILE = "bagua_cache.sqlite3"
# Room for the tables of an empty file, whatever its page size.
_LEAST_BYTES = 1 << 20
# How long one process may wait for the others to write.
_BUSY_SECONDS = 60.0
# SQLite takes at least this many values in one statement, in every version.
_MOST_VARIABLES = 999


class SqliteStore(Store):
    """A mapping from keys to bytes, in a file that any number of processes of one host share.

    May be handed to other processes, forked or spawned (workers of a DataLoader), and used by several threads.

    Args:
        path: a folder on a local disk, made if need be: network file systems do not lock as SQLite needs it. What is
            there from an earlier run is used. By default a temporary folder that goes with this process; then only
            this process and those it starts share it.
        capacity_per_node: bytes that the file may take. A value that does not fit in is not stored, with a warning
            the first time.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, capacity_per_node: int = 107_374_182_400) -> None:
        if capacity_per_node < _LEAST_BYTES:
            raise ValueError(
                f"SqliteStore: capacity_per_node is to be {_LEAST_BYTES} bytes or more, got {capacity_per_node}"
            )
        self._capacity = capacity_per_node
        if path is None:
            self._folder = Path(tempfile.mkdtemp(prefix="bagua_cache_"))
            weakref.finalize(self, _remove, self._folder, os.getpid())
        else:
            self._folder = Path(path)
            self._folder.mkdir(parents=True, exist_ok=True)
        self._has_warned = False
        self._connections = threading.local()
        self._connection()

    def _connection(self) -> sqlite3.Connection:
        """Return a connection of this thread and process: SQLite allows no other to use it, not even after a fork."""
        held = self._connections
        if getattr(held, "process", None) != os.getpid():
            # What a fork has inherited may not even be closed.
            held.inherited = [*getattr(held, "inherited", []), getattr(held, "connection", None)]
            held.connection, held.process = self._connect(), os.getpid()
        connection: sqlite3.Connection = held.connection
        return connection

    def _connect(self) -> sqlite3.Connection:
        # None: transactions begin where we say.
        connection = sqlite3.connect(self._folder / _FILE, timeout=_BUSY_SECONDS, isolation_level=None)
        # Not waiting for the disk is no loss: a cache can be filled again. A rollback journal, not a write-ahead log:
        # opening that one fails at once, without waiting, where other processes do the same.
        connection.execute("PRAGMA synchronous = OFF")
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {self._capacity // page_bytes}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE IF NOT EXISTS cache (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        connection.execute("COMMIT")
        return connection

    def set(self, key: str, value: bytes) -> None:
        """Store a value, in place of any other with this key."""
        self.mset({key: value})

    def mset(self, mapping: Mapping[str, bytes]) -> None:
        """Store several values in one transaction."""
        connection = self._connection()
        try:
            # The right to write first: SQLite does not wait for it once a transaction has read.
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO cache VALUES (?, ?)", mapping.items())
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            # Python 3.10 does not show the code, SQLITE_FULL.
            if "disk is full" not in str(error):
                raise
            self._warn_that_full()

    def _warn_that_full(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "the cache in %s holds its %d bytes, or its disk is full: nothing more is stored",
                self._folder,
                self._capacity,
            )

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, None where there is none."""
        return self.mget([key])[0]

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of several keys, None for those that are not there."""
        connection = self._connection()
        found: dict[str, bytes] = {}
        for begin in range(0, len(keys), _MOST_VARIABLES):
            some = keys[begin : begin + _MOST_VARIABLES]
            places = ", ".join("?" * len(some))
            found.update(connection.execute(f"SELECT key, value FROM cache WHERE key IN ({places})", some).fetchall())
        return [found.get(key) for key in keys]

    def num_keys(self) -> int:
        """Return how many keys there are."""
        count: int = self._connection().execute("SELECT COUNT(*) FROM cache").fetchone()[0]
        return count

    def clear(self) -> None:
        """Remove all keys."""
        self._connection().execute("DELETE FROM cache")

    def status(self) -> bool:
        """Return True if the file can be read."""
        return self.num_keys() >= 0

    def shutdown(self) -> None:
        """Close the file in this thread; the next operation opens it again."""
        if getattr(self._connections, "process", None) == os.getpid():
            self._connections.connection.close()
        self._connections = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_connections"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connections = threading.local()


def _remove(folder: Path, owner: int) -> None:
    # A forked worker has this finalizer too.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
