# SPDX-License-Identifier: Apache-2.0
"""Where those who live agree on who the members are, as often as that changes."""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypedDict

import torch.distributed as dist

from bagua._meeting_store import Beats, MeetingStore
from bagua._pulse import Feeler, Sign

# Seconds.
_PAUSE = 0.02
# Those who start at the same moment come within this time.
_SETTLE = 0.3


class _Decision(TypedDict):
    uuid: int
    members: list[str]
    refused: dict[str, _Refusal]


class _Refusal(NamedTuple):
    """Why one who has come cannot be a member."""

    is_for_contract: bool
    reason: str


class _Came(NamedTuple):
    member: str
    # A digest of the text that has to be the same on all members.
    contract: str
    # Members of the last decision to whom this one has no way.
    unreached: list[str]


class _State(enum.Enum):
    REACHED = enum.auto()
    # It lives and reaches the store.
    CUT_OFF = enum.auto()
    GONE = enum.auto()
    NOT_KNOWN_YET = enum.auto()


class Meetings:
    """Meetings are numbered. Whoever wants a change comes to the first that has not ended.

    A process that joins does, and all members once they know of it, or of a death. The first of those who have come
    decides, once all former members have come that live, and writes down who goes on. If it dies meanwhile the next one
    does. A member that is stopped is waited for as long as `patience` says, from when another one has come; it may join
    later.

    Nobody trains apart from the others. A process is taken for dead if it cannot be reached and does not count in the
    store. Two that live and do not reach each other cannot both be members: one of them is refused, and told so. One
    who was no member decides only when no former member counts.
    """

    def __init__(self, store: dist.Store, own: str, at_least: int, patience: timedelta, limit: timedelta) -> None:
        """Take part under the name `own`; `limit` is how long a store is waited for that does not answer."""
        self.store = MeetingStore(store)
        self.at_least = at_least
        self.patience = patience.total_seconds()
        self.limit = limit
        self._own = own
        # Of the next meeting, as far as this process knows, and what the last one has come to.
        self._number = 0
        self._last: _Decision = {"uuid": 0, "members": [], "refused": {}}

    def meet(self, contract: Sequence[str], unreached: Iterable[str] = ()) -> tuple[int, list[str]]:
        """Return a number that no other meeting has, and the members, this process among them.

        Args:
            contract: what has to be the same on all members, line by line.
            unreached: members that this process could not reach when they were to become a group.

        Raises:
            ValueError: this process differs from the others in its contract.
            RuntimeError: it cannot reach one of the others, or not the store.
        """
        text = "\n".join(contract)
        digest = hashlib.sha256(text.encode()).hexdigest()
        while True:
            with Feeler() as feeler:
                signs = feeler.signs(unreached)
                still = [member for member, sign in signs.items() if sign is not Sign.LIVES]
                own = _Came(self._own, digest, still)
                decision = _Meeting(self, own, text, feeler).decision()
            if self._own in decision["members"]:
                return decision["uuid"], decision["members"]
            if self._own in decision["refused"]:
                is_for_contract, reason = decision["refused"][self._own]
                raise (ValueError if is_for_contract else RuntimeError)(reason)

    def is_needed(self) -> bool:
        """Whether someone waits for the members, or others have met without this one. Asks the store once.

        A store that was served anew learns again how far the members are.
        """

        def look(store: dist.Store) -> bool:
            number, uuid = self._latest(store)
            # Of the same number is a meeting in a store that was served anew, of those who came first.
            has_met_apart = number > self._number or (number == self._number and uuid != self._last["uuid"])
            return has_met_apart or store.check([f"{self._number}/came/1"])

        return self._number > 0 and self.store.ask(look, timedelta(0))

    def leave(self) -> None:
        """Tell the others that this process goes, though it lives."""
        self.store.ask(lambda store: store.set(f"left/{self._own}", ""), timedelta(0))

    def come(self, store: dist.Store, own: _Came, contract: str) -> tuple[int, int, list[str]]:
        """Go to the first meeting that has not ended: return its number, the place there, and the former members."""
        store.set(f"contract/{own.contract}", contract)
        self._number = max(self._number, self._latest(store)[0])
        while store.check([f"{self._number}/decision"]):
            self._number += 1
        number = self._number
        if number > 0 and store.check([f"{number - 1}/decision"]):
            self._last = json.loads(store.get(f"{number - 1}/decision"))
        place = store.add(f"{number}/count", 1)
        store.set(f"{number}/came/{place}", json.dumps(own))
        store.set(f"{number}/is_here/{own.member}", "")
        return number, place, self._last["members"]

    def take(self, number: int, decision: _Decision) -> None:
        """Know what a meeting has come to."""
        self._number, self._last = number + 1, decision

    def _latest(self, store: dist.Store) -> tuple[int, int]:
        """Return the number of the next meeting, and what that of the last decision is.

        A store that was served anew learns of this process who the members are.
        """
        number, uuid = json.loads(store.get("latest")) if store.check(["latest"]) else (0, 0)
        if number < self._number:
            _write(store, self._number - 1, self._last)
        return number, uuid


class _Meeting:
    """One meeting, from when this process has come until it is decided."""

    def __init__(self, meetings: Meetings, own: _Came, contract: str, feeler: Feeler) -> None:
        self._meetings = meetings
        self._own = own
        self._contract = contract
        self._feeler = feeler
        self._beats = Beats()
        meetings.store.ask(self._come, meetings.limit)

    def _come(self, store: dist.Store) -> None:
        self._number, self._place, self._former = self._meetings.come(store, self._own, self._contract)
        self._came: dict[int, _Came] = {}
        # When this process has come, the last one has, and the first of the former members has.
        self._since = self._last_came = time.monotonic()
        self._former_since: float | None = None

    def decision(self) -> _Decision:
        """Wait for it, and make it if that is up to this process."""
        while True:
            decision = self._meetings.store.ask(self._look, self._meetings.limit)
            if decision is not None:
                self._meetings.take(self._number, decision)
                return decision
            time.sleep(_PAUSE)

    def _look(self, store: dist.Store) -> _Decision | None:
        if store.check([f"{self._number}/decision"]):
            decision: _Decision = json.loads(store.get(f"{self._number}/decision"))
            return decision
        if not store.check([f"{self._number}/is_here/{self._own.member}"]):
            # The store has been served anew meanwhile.
            self._come(store)
        self._see_who_came(store)
        came = {one.member: one for one in self._came.values()}
        missing = [m for m in self._former if m not in came and not store.check([f"left/{m}"])]
        states = self._states(store, list(came), missing)
        earlier = {one.member for place, one in self._came.items() if place < self._place} - {self._own.member}
        if any(states[member] is not _State.GONE for member in earlier):
            # It is up to them.
            return None
        decided = self._decide(store, came, missing, states)
        if decided is not None:
            _write(store, self._number, decided)
        # The next look finds it, or another one's who had been faster.
        return None

    def _see_who_came(self, store: dist.Store) -> None:
        for place in range(1, store.add(f"{self._number}/count", 0) + 1):
            key = f"{self._number}/came/{place}"
            if place not in self._came and store.check([key]):
                self._came[place] = _Came(*json.loads(store.get(key)))
                self._last_came = time.monotonic()
                if self._former_since is None and self._came[place].member in self._former:
                    self._former_since = self._last_came

    def _states(self, store: dist.Store, came: Sequence[str], missing: Sequence[str]) -> dict[str, _State]:
        others = [member for member in [*came, *missing] if member != self._own.member]
        states = {self._own.member: _State.REACHED}
        for member in missing:
            # To see below, after a host has not answered for seconds, whether it has counted meanwhile.
            self._beats.counts(store, member)
        for member, sign in self._feeler.signs(others).items():
            # Who was no member must not take the members for dead where only it cannot reach them.
            has_surely_ended = sign is Sign.ENDED and member in missing and self._own.member in self._former
            counts = None if sign is Sign.LIVES or has_surely_ended else self._beats.counts(store, member)
            if sign is Sign.LIVES:
                states[member] = _State.REACHED
            elif has_surely_ended or counts is False:
                states[member] = _State.GONE
            else:
                states[member] = _State.NOT_KNOWN_YET if counts is None else _State.CUT_OFF
        return states

    def _decide(
        self, store: dist.Store, came: dict[str, _Came], missing: Sequence[str], states: dict[str, _State]
    ) -> _Decision | None:
        """Return who goes on, the former members first, once nobody is waited for."""
        now = time.monotonic()
        if _State.NOT_KNOWN_YET in states.values():
            return None
        is_patient = self._former_since is None or now - self._former_since < self._meetings.patience
        if is_patient and any(states[member] is not _State.GONE for member in missing):
            return None
        cut_off = [member for member in came if states[member] is _State.CUT_OFF]
        if cut_off and now - self._since < self._meetings.patience:
            return None
        present = [m for m in self._former if m in came] + [m for m in came if m not in self._former]
        present = [member for member in present if states[member] is not _State.GONE]
        apart = [{self._own.member, member} for member in cut_off]
        apart += [{one.member, other} for one in came.values() for other in one.unreached]
        refused = _refuse_the_cut_off(present, apart)
        for member in present:
            if came[member].contract != came[present[0]].contract:
                refused[member] = _difference(store, (present[0], came[present[0]]), (member, came[member]))
        members = [member for member in present if member not in refused]
        are_new = any(member not in self._former for member in members)
        if len(members) < self._meetings.at_least or (are_new and now - self._last_came < _SETTLE):
            return None
        return {"uuid": secrets.randbits(62), "members": members, "refused": refused}


def _write(store: dist.Store, number: int, decision: _Decision) -> None:
    # Another one may have decided, where this process seemed to be dead.
    decided = json.loads(store.compare_set(f"{number}/decision", "", json.dumps(decision)))
    store.set("latest", json.dumps([number + 1, decided["uuid"]]))


def _refuse_the_cut_off(present: list[str], apart: Sequence[set[str]]) -> dict[str, _Refusal]:
    """Take out of `present` as many as it needs so that the rest reach each other: those apart from most, the last."""
    refused: dict[str, _Refusal] = {}
    while pairs := [pair for pair in apart if pair <= set(present)]:
        worst = max(reversed(present), key=lambda member: sum(member in pair for pair in pairs))
        other = next(iter(next(pair for pair in pairs if worst in pair) - {worst}))
        present.remove(worst)
        reason = (
            f"bagua.elastic: this process ({_address(worst)}) and a member ({_address(other)}) both reach the store in "
            "which the members meet, but not each other"
        )
        refused[worst] = _Refusal(is_for_contract=False, reason=reason)
    return refused


def _difference(store: dist.Store, first: tuple[str, _Came], other: tuple[str, _Came]) -> _Refusal:
    contracts = [store.get(f"contract/{came.contract}").decode().split("\n") for _, came in (first, other)]
    lines = itertools.zip_longest(*contracts, fillvalue="nothing more")
    expected, got = next((one, another) for one, another in lines if one != another)
    reason = (
        f"bagua.elastic: this process ({_address(other[0])}) cannot train together with the members "
        f"({_address(first[0])}). They have {expected}; this one has {got}"
    )
    return _Refusal(is_for_contract=True, reason=reason)


def _address(member: str) -> str:
    port, _, _, _, _, address = member.split(":", 5)
    return f"{address} port {port}"
