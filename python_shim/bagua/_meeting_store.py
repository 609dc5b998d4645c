# SPDX-License-Identifier: Apache-2.0
"""The store in which members agree on who they are: it may be away for a time, and be served anew without its keys."""

from __future__ import annotations

import argparse
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

_logger = logging.getLogger("bagua")
_PREFIX = "bagua_elastic"
_Answer = TypeVar("_Answer")
# Seconds. An answer takes a round trip; a store whose process is stopped, or whose host is silent, gives none.
_PAUSE = 0.5
_ANSWER = 5.0
_MOST_ANSWER = 30.0
_MOST_LEFT = 4
# A member that lives and reaches the store counts so often, and is seen to have stopped counting after so long.
BEAT = 0.25
_MISSED = 1.5


class MeetingStore:
    """Asks a store again while it does not answer, over new connections of its own; one that has no clone() fails."""

    def __init__(self, store: dist.Store) -> None:
        self._given = store
        self._lock = threading.Lock()
        self._line = _Line(lambda: store)
        # Those that were given up, of which each has a thread as long as the store keeps its connection.
        self._left: list[_Line] = []

    def ask(self, question: Callable[[dist.Store], _Answer], limit: timedelta) -> _Answer:
        """Return what the question finds, asked for as long as `limit` says, or a few seconds. It may be asked twice.

        Raises:
            RuntimeError: the store does not answer.
        """
        deadline = time.monotonic() + limit.total_seconds()
        has_waited = False
        while True:
            line = self._line
            seconds = min(max(deadline - time.monotonic(), _ANSWER), _MOST_ANSWER)
            try:
                return line.ask(question, seconds)
            except (dist.DistError, concurrent.futures.TimeoutError) as error:
                self._replace(line)
                if time.monotonic() >= deadline:
                    raise RuntimeError(
                        "bagua.elastic: the store in which the members agree on who they are does not answer. Let it "
                        f"be served by a process that outlives them, such as `python -m bagua.elastic`: {error!r}"
                    ) from error
                if not has_waited:
                    _logger.warning("the store of the members does not answer, and is asked again: %r", error)
                    has_waited = True
                time.sleep(_PAUSE)

    def close(self) -> None:
        """End the thread that asks, unless the store keeps it waiting."""
        self._line.close()

    def _replace(self, failed: _Line) -> None:
        with self._lock:
            self._left = [line for line in self._left if line.is_stuck()]
            if failed is self._line and len(self._left) < _MOST_LEFT:
                failed.close()
                self._left.append(failed)
                self._line = _Line(self._given.clone)


class _Line:
    """A connection with a thread of its own, which can be given up while the store does not answer."""

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        self._connect = connect
        self._asked: queue.SimpleQueue[tuple[Callable[[dist.Store], Any], concurrent.futures.Future[Any]] | None]
        self._asked = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bagua_store", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[dist.Store], _Answer], seconds: float) -> _Answer:
        answer: concurrent.futures.Future[_Answer] = concurrent.futures.Future()
        self._asked.put((question, answer))
        try:
            return answer.result(seconds)
        finally:
            # What was given up before it began is not to be done later.
            answer.cancel()

    def close(self) -> None:
        self._asked.put(None)

    def is_stuck(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        store: dist.Store | None = None
        while (asked := self._asked.get()) is not None:
            question, answer = asked
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if store is None:
                    store = dist.PrefixStore(_PREFIX, self._connect())
                answer.set_result(question(store))
            except Exception as error:
                answer.set_exception(error)


class _Seen(NamedTuple):
    beats: int
    # When it was first seen, and when last.
    since: float
    last: float
    # Whether another count had been seen before.
    has_grown: bool


class Beats:
    """What is seen of the counts that members keep in the store."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def is_counting(self, store: dist.Store, member: str) -> bool | None:
        """Whether a member has counted lately; None as long as that cannot be said."""
        now = time.monotonic()
        count = store.add(beat_key(member), 0)
        seen = self._seen.get(member)
        if seen is None or now - seen.last > _MISSED + _PAUSE:
            # Nothing is known of the time in between.
            seen = _Seen(count, now, now, has_grown=False)
        elif count != seen.beats:
            seen = _Seen(count, now, now, has_grown=True)
        self._seen[member] = seen = seen._replace(last=now)
        if now - seen.since >= _MISSED:
            return False
        return True if seen.has_grown else None


def beat_key(member: str) -> str:
    """Return the key under which a member counts."""
    return f"beat/{member}"


def serve() -> None:
    """Serve one for ever, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m bagua.elastic", description="Serve a store for members to meet in")
    parser.add_argument("--host", default="0.0.0.0", help="where to listen")
    parser.add_argument("--port", type=int, default=29510)
    given = parser.parse_args()
    store = dist.TCPStore(given.host, given.port, is_master=True, wait_for_workers=False)
    print(f"serving a store at {given.host} port {store.port}", flush=True)
    threading.Event().wait()
