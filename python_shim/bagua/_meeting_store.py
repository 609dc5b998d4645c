# SPDX-License-Identifier: Apache-2.0
"""The store in which members agree on who they are: it may be away for a time, and be served anew without its keys."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

_logger = logging.getLogger("bagua")
_PREFIX = "bagua_elastic"
_Answer = TypeVar("_Answer")
# Seconds.
_PAUSE = 0.5
_CONNECT = timedelta(seconds=2)
# A member that lives and reaches the store counts so often, and is seen to have stopped counting after so long.
BEAT = 0.25
_MISSED = 1.5


class MeetingStore:
    """Asks a store again while it does not answer, over a connection of its own where that is possible.

    Args:
        store: the user's. A TCPStore is connected to anew; another kind answers or fails.
    """

    def __init__(self, store: dist.Store) -> None:
        self._given = store
        self._store: dist.Store = dist.PrefixStore(_PREFIX, store)
        self._lock = threading.Lock()

    def ask(self, question: Callable[[dist.Store], _Answer], limit: timedelta) -> _Answer:
        """Return what the question finds, asked for as long as `limit` says. It may be asked twice.

        Raises:
            RuntimeError: the store does not answer.
        """
        deadline = time.monotonic() + limit.total_seconds()
        has_waited = False
        while True:
            asked = self._store
            try:
                return question(asked)
            except dist.DistError as error:
                if time.monotonic() >= deadline:
                    raise RuntimeError(
                        "bagua.elastic: the store in which the members agree on who they are does not answer. Let it "
                        f"be served by a process that outlives them, such as `python -m bagua.elastic`: {error}"
                    ) from error
                if not has_waited:
                    _logger.warning("the store of the members does not answer, and is asked again: %s", error)
                    has_waited = True
                time.sleep(_PAUSE)
                self.connect_again(asked)

    def connect_again(self, failed: dist.Store | None = None) -> None:
        """Make a new connection in the place of one that has failed, if the store can be reached."""
        if not isinstance(self._given, dist.TCPStore):
            return
        with self._lock, contextlib.suppress(dist.DistError):
            if failed is None or failed is self._store:
                again = dist.TCPStore(
                    self._given.host, self._given.port, is_master=False, wait_for_workers=False, timeout=_CONNECT
                )
                self._store = dist.PrefixStore(_PREFIX, again)


class Beats:
    """What is seen of the counts that members keep in the store."""

    def __init__(self) -> None:
        # The last count of each, when it was first seen, and whether another one had been seen before.
        self._seen: dict[str, tuple[int, float, bool]] = {}

    def counts(self, store: dist.Store, member: str) -> bool | None:
        """Whether a member has counted lately; None as long as that cannot be said."""
        now = time.monotonic()
        count = store.add(beat_key(member), 0)
        last, since, has_counted = self._seen.get(member, (count, now, False))
        if count != last:
            since, has_counted = now, True
        self._seen[member] = (count, since, has_counted)
        if now - since >= _MISSED:
            return False
        return True if has_counted else None


def beat_key(member: str) -> str:
    """Return the key under which a member counts."""
    return f"beat/{member}"
