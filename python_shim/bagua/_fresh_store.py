# SPDX-License-Identifier: Apache-2.0
"""Part of a store in which nothing is left of what was there before.

A store may outlive the groups that are made in it: an attempt to make one in which a rank did not come, ranks that
torchrun starts again. Addresses and errors of the ranks that are gone would be found in it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from bagua._native import _C

_logger = logging.getLogger("bagua")

# How often a rank that waits looks whether the ranks have been called together anew.
_SLICE = timedelta(milliseconds=500)
# Seconds between two questions to the store whether something is there.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# How often it looks whether it waits for a rank that cannot hear it, and how long such a rank may be one of another job
# with the same keys: until then somebody with its secret has come in the place of the rank that looks.
_LOOK = timedelta(seconds=5)
_PATIENCE = timedelta(seconds=60)
# Begins what rank 0 says in the place of a meeting's name, which is hexadecimal.
_REFUSED = "refused: "
# In the place of a fingerprint, which is hexadecimal.
_NO_SECRET = "none"
_UNUSABLE = "unusable"
# What is read of what anybody may have written, and how often somebody who writes in between is made way for.
_MOST_SECRETS = 64
_MOST_ATTEMPTS = 100


class _Meeting:
    """How ranks find those that are there at the same time as they are.

    A rank comes with a ticket that nobody has had before. Rank 0 calls the holders of the latest tickets together, in a
    meeting with a new name, and again whenever one has come anew. A meeting begins when all have said that they are in
    it. So a rank of an earlier attempt can be called, but cannot answer.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        # Of another size: torchrun goes on with the same store where the number of its hosts changes.
        # Of ranks with different secrets none sees what another writes, but for this: for each rank the fingerprints of
        # all that have come as it. Several have where jobs with different secrets are on one store.
        self._secrets = dist.PrefixStore(f"secrets/{size}", store)
        self._rank, self._size = rank, size
        self._secret = self._announced_secret()
        self._store = dist.PrefixStore(f"meeting/{size}", _C.sealed_store(store))
        self._timeout = min(timeout, _C.LONGEST_TIMEOUT)
        self._end = time.monotonic() + self._timeout.total_seconds()
        # The server is asked by all ranks: ten thousand times a second at most.
        self._longest_pause = max(_LONGEST_PAUSE, size / 10_000)
        self._ticket = secrets.token_hex(16)
        self._name = ""
        # When a rank with another secret was first seen.
        self._met_stranger: float | None = None

    def name(self) -> str:
        """Return the name of the meeting, once it has begun."""
        self._store.set(f"came/{self._rank}", self._ticket)
        return self._call_together() if self._rank == 0 else self._follow_calls()

    def _call_together(self) -> str:
        came = [f"came/{rank}" for rank in range(self._size)]
        while not self._wait(came, _LOOK):
            self._compare_secrets()
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
        while not self._wait([call], _LOOK):
            self._compare_secrets()
        while True:
            name = self._store.get(call).decode()
            if name.startswith(_REFUSED):
                raise self._refusal(name.removeprefix(_REFUSED))
            if name != self._name:
                self._name = name
                self._store.set(self._seat(self._rank), "")
            if self._wait([self._beginning()], _SLICE):
                return self._name

    def _announced_secret(self) -> str:
        """Tell the other ranks which secret this one has, also where it cannot go on with it."""
        try:
            secret = _C.job_secret_fingerprint() or _NO_SECRET
        except Exception:
            self._announce(_UNUSABLE)
            raise
        self._announce(secret)
        return secret

    def _announce(self, secret: str) -> None:
        key, known = str(self._rank), ""
        for _ in range(_MOST_ATTEMPTS):
            if secret in known.split():
                return
            wanted = f"{known} {secret}".lstrip()
            try:
                now = self._secrets.compare_set(key, known, wanted).decode(errors="replace")
            except RuntimeError:
                break  # not every kind of store can
            if now == wanted:
                return
            known = now
        self._secrets.set(key, secret)

    def _secrets_of(self, rank: int) -> list[str]:
        if not self._secrets.check([str(rank)]):
            return []
        text: str = self._secrets.get(str(rank)).decode(errors="replace")
        return [secret[:16] for secret in text.split()[:_MOST_SECRETS]]

    def _compare_secrets(self) -> None:
        # Only rank 0 needs them all.
        why = self._stranger(range(1, self._size) if self._rank == 0 else [0])
        now = time.monotonic()
        if not why:
            self._met_stranger = None
        elif self._met_stranger is None:
            self._met_stranger = now
            _logger.warning(
                "bagua: rank %d of %d still waits: %s (fingerprints, not the secrets themselves). On the ranks of one "
                "job BAGUA_JOB_SECRET, or what is in the file of BAGUA_JOB_SECRET_FILE, must be the same. Two jobs on "
                "one store need not care: their other ranks have %d s to come",
                self._rank,
                self._size,
                why,
                min(_PATIENCE.total_seconds(), max(0.0, self._end - now)),
            )
        elif now - self._met_stranger >= _PATIENCE.total_seconds():
            raise self._refused_by_all(why)

    def _stranger(self, ranks: Iterable[int]) -> str:
        """Say which of the ranks has come with another secret only; else ""."""
        # Fingerprints that somebody has made up end what would end in a timeout, sooner.
        own = self._secrets_of(self._rank)
        for rank in ranks:
            theirs = self._secrets_of(rank)
            # A secret with which somebody has come as this rank, too, is that of another job.
            foreign = [secret for secret in theirs if secret not in own]
            if self._secret not in theirs and foreign:
                return f"rank {self._rank} has {_told(self._secret)}, and rank {rank} {_told(foreign[-1])}"
        return ""

    def _refused_by_all(self, why: str) -> Exception:
        # Those that wait for rank 0, which alone looks at all, are told.
        for rank in range(1, self._size) if self._rank == 0 else []:
            if self._store.check([f"came/{rank}"]):
                ticket = self._store.get(f"came/{rank}").decode()
                self._store.set(f"called/{rank}/{ticket}", _REFUSED + why)
        return self._refusal(why)

    def _refusal(self, why: str) -> Exception:
        return ValueError(
            f"bagua: rank {self._rank} of {self._size} could not make the process group: {why} (fingerprints, not the "
            "secrets themselves). BAGUA_JOB_SECRET, or what is in the file of BAGUA_JOB_SECRET_FILE, must be the same "
            "on all ranks"
        )

    def _seat(self, rank: int) -> str:
        return f"here/{self._name}/{rank}"

    def _beginning(self) -> str:
        return f"begun/{self._name}"

    def _wait(self, keys: Sequence[str], limit: timedelta = timedelta.max) -> bool:
        now = time.monotonic()
        if now >= self._end:
            raise self._failure()
        end = min(self._end, now + min(limit, self._timeout).total_seconds())
        pause = _SHORTEST_PAUSE
        # Not by store.wait(): torch logs warnings of a broken connection where its time is over.
        while not self._store.check(list(keys)):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, self._longest_pause)
        return True

    def _failure(self) -> Exception:
        expected = [self._seat(rank) if self._name else f"came/{rank}" for rank in range(self._size)]
        missing = [rank for rank, key in enumerate(expected) if not self._store.check([key])]
        # All have come: then it is rank 0 that has not called them.
        names = ", ".join(str(rank) for rank in missing or [0])
        why = "" if self._name else self._stranger(missing)
        if why:
            milliseconds = self._timeout // timedelta(milliseconds=1)
            return self._refused_by_all(f"not there after {milliseconds} ms: rank {names}; {why}")
        return dist.DistBackendError(
            f"bagua: rank {self._rank} of {self._size} could not make the process group. Not there after "
            f"{self._timeout // timedelta(milliseconds=1)} ms: rank {names}. Check that these processes have started "
            "and are alive"
        )


def _told(secret: str) -> str:
    if secret == _UNUSABLE:
        return "one that it cannot use (its own error says why)"
    return "no job secret" if secret == _NO_SECRET else f"the job secret {secret}"


def new_name(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all `size` ranks that call this together get, and nobody ever got before.

    Ranks whose earlier call has failed may call again.
    """
    return _Meeting(store, rank, size, timeout).name()


def fresh_part(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return a part of `store` for a new group of `size` ranks, this one `rank`. Every rank of it calls this.

    With a job secret it is sealed: see `backend/security/sealed_store.h`. Its name, which no group had before, keeps
    what was written for another group out of it.
    """
    return dist.PrefixStore(f"group/{new_name(store, rank, size, timeout)}", _C.sealed_store(store))
