# SPDX-License-Identifier: Apache-2.0
"""Part of a store in which nothing is left of what was there before.

A store may outlive the groups that are made in it: an attempt to make one in which a rank did not come, ranks that
torchrun starts again. Addresses and errors of the ranks that are gone would be found in it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from bagua._native import _C

# How often a rank that waits looks whether the ranks have been called together anew.
_SLICE = timedelta(milliseconds=500)


class _Meeting:
    """How ranks find those that are there at the same time as they are.

    A rank comes with a ticket that nobody has had before. Rank 0 calls the holders of the latest tickets together, in a
    meeting with a new name, and again whenever one has come anew. A meeting begins when all have said that they are in
    it. So a rank of an earlier attempt can be called, but cannot answer.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        # Of another size: torchrun goes on with the same store where the number of its hosts changes.
        self._store = dist.PrefixStore(f"meeting/{size}", store)
        self._rank, self._size = rank, size
        self._timeout = min(timeout, _C.LONGEST_TIMEOUT)
        self._end = time.monotonic() + self._timeout.total_seconds()
        self._ticket = secrets.token_hex(16)
        self._name = ""

    def name(self) -> str:
        """Return the name of the meeting, once it has begun."""
        self._store.set(f"came/{self._rank}", self._ticket)
        return self._call_together() if self._rank == 0 else self._follow_calls()

    def _call_together(self) -> str:
        came = [f"came/{rank}" for rank in range(self._size)]
        while not self._wait(came):
            pass
        called: list[bytes] = []
        while True:
            tickets = self._store.multi_get(came)
            if tickets != called:
                called, self._name = tickets, secrets.token_hex(16)
                calls = [f"called/{rank}/{ticket.decode()}" for rank, ticket in enumerate(tickets)]
                self._store.multi_set(calls, [self._name] * self._size)  # type: ignore[attr-defined]
                self._store.set(self._seat(0), "")
            if self._wait([self._seat(rank) for rank in range(self._size)], _SLICE):
                self._store.set(self._beginning(), "")
                return self._name

    def _follow_calls(self) -> str:
        call = f"called/{self._rank}/{self._ticket}"
        while not self._wait([call]):
            pass
        while True:
            name = self._store.get(call).decode()
            if name != self._name:
                self._name = name
                self._store.set(self._seat(self._rank), "")
            if self._wait([self._beginning()], _SLICE):
                return self._name

    def _seat(self, rank: int) -> str:
        return f"here/{self._name}/{rank}"

    def _beginning(self) -> str:
        return f"begun/{self._name}"

    def _wait(self, keys: Sequence[str], limit: timedelta = timedelta.max) -> bool:
        now = time.monotonic()
        if now >= self._end:
            raise self._failure()
        limit = min(limit, timedelta(seconds=self._end - now))
        try:
            self._store.wait(list(keys), limit)
        except (RuntimeError, LookupError):
            # Every kind of store has an error of its own for a timeout.
            if time.monotonic() - now < 0.9 * limit.total_seconds():
                raise
            return False
        return True

    def _failure(self) -> Exception:
        expected = [self._seat(rank) if self._name else f"came/{rank}" for rank in range(self._size)]
        missing = [rank for rank, key in enumerate(expected) if not self._store.check([key])]
        # All have come: then it is rank 0 that has not called them.
        names = ", ".join(str(rank) for rank in missing or [0])
        return dist.DistBackendError(
            f"bagua: rank {self._rank} of {self._size} could not make the process group. Not there after "
            f"{self._timeout // timedelta(milliseconds=1)} ms: rank {names}. Check that these processes have started "
            "and are alive"
        )


def new_name(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all `size` ranks that call this together get, and nobody ever got before.

    Ranks whose earlier call has failed may call again.
    """
    return _Meeting(store, rank, size, timeout).name()


def fresh_part(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return a part of `store` for a new group of `size` ranks, this one `rank`. Every rank of it calls this."""
    return dist.PrefixStore(f"group/{new_name(store, rank, size, timeout)}", store)
