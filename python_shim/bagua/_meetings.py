# SPDX-License-Identifier: Apache-2.0
"""Where those who live agree on who the members are, as often as that changes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import NamedTuple, TypedDict

import torch.distributed as dist

from bagua._meeting_store import BEAT, Beats, MeetingStore, beat_key
from bagua._pulse import Feeler, Sign, address_of

_logger = logging.getLogger("bagua")
# Seconds between two looks of the process that decides, and of the others.
_PAUSE = 0.02
_LONG_PAUSE = 0.1
# Those who start at the same moment come within this time.
_SETTLE = 0.3
# So few may look as often as the one that decides.
_FEW = 8
# After this time a process says what it waits for.
_SILENCE = 10.0


class _Decision(TypedDict):
    uuid: int
    members: list[str]


class _Came(NamedTuple):
    member: str
    # A digest of the text that has to be the same on all members.
    contract: str
    # Members of the last decision to whom this one has no way.
    unreached: list[str]
    # How many members it asks for.
    at_least: int


class Meetings:
    """Meetings are numbered. Whoever wants a change comes to the first that has not ended.

    A process that joins does, and all members once they know of it, or of a death. The first of those who have come
    decides, once all former members have come that live, and writes down who goes on. If it dies or stops meanwhile the
    next one does. A member that is stopped is waited for as long as `patience` says, from when another one has come; it
    may join later.

    A process is taken for dead if it cannot be reached and does not count in the store. Two that live and do not reach
    each other cannot both be members: one of them is refused, and told so. One who was no member decides with the
    former members, or when none of them counts.
    """

    def __init__(self, store: dist.Store, own: str, at_least: int, patience: timedelta, limit: timedelta) -> None:
        """Take part under the name `own`; `limit` is how long a store is waited for that does not answer."""
        self.store = MeetingStore(store)
        self.beats = Beats()
        self.own = own
        self.at_least = at_least
        self.patience = patience.total_seconds()
        self.limit = limit
        # Of the next meeting, as far as this process knows, and what the last one has come to.
        self._number = 0
        self._last: _Decision = {"uuid": 0, "members": []}

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
                own = _Came(self.own, digest, self._still_unreached(feeler, list(unreached)), self.at_least)
                decision = _Meeting(self, own, text, feeler).decision()
            if self.own in decision["members"]:
                return decision["uuid"], decision["members"]

    def is_needed(self) -> bool:
        """Whether someone waits for the members, or others have met without this one. Asks the store once.

        A store that was served anew learns again how far the members are.
        """

        def look(store: dist.Store) -> bool:
            number, uuid = self._latest(store)
            # In a store that was served anew others may have met who knew nothing of the members.
            have_others_met = number > self._number or (number == self._number and uuid != self._last["uuid"])
            return have_others_met or store.check([f"{self._number}/came/1"])

        return self._number > 0 and self.store.ask(look, timedelta(0))

    def come(self, store: dist.Store, own: _Came, contract: str) -> tuple[int, int, list[str]]:
        """Go to the first meeting that has not ended: return its number, the place there, and the former members."""
        store.set(f"contract/{own.contract}", contract)
        self._number = max(self._number, self._latest(store)[0])
        while store.check([f"{self._number}/decision"]):
            self._number += 1
        number = self._number
        if number > 0 and store.check([f"{number - 1}/decision"]):
            self._last = json.loads(store.get(f"{number - 1}/decision"))
        # Who was stopped, and comes, is at work from now on, not only from its next beat.
        store.add(beat_key(own.member), 1)
        place = store.add(f"{number}/count", 1)
        store.set(f"{number}/came/{place}", json.dumps(own))
        store.set(f"{number}/is_here/{own.member}", "")
        return number, place, self._last["members"]

    def take(self, number: int, decision: _Decision) -> None:
        self._number, self._last = number + 1, decision

    def feel(self, feeler: Feeler, members: list[str]) -> dict[str, Sign]:
        """Return what is seen of members, and see meanwhile whether they count: a silent host takes seconds."""
        with ThreadPoolExecutor(1) as pool:
            felt = pool.submit(feeler.signs, members)
            while not wait([felt], BEAT).done:
                self.store.ask(functools.partial(self._counting, members), self.limit)
            return felt.result()

    def _still_unreached(self, feeler: Feeler, unreached: list[str]) -> list[str]:
        """Return those who live and cannot be reached, after half of the time that others wait for this process."""
        deadline = time.monotonic() + self.patience / 2
        while unreached and time.monotonic() < deadline:
            signs = self.feel(feeler, unreached)
            silent = [member for member in unreached if signs[member] is not Sign.LIVES]
            unreached = self.store.ask(functools.partial(self._counting, silent), self.limit)
            time.sleep(_LONG_PAUSE)
        return unreached

    def _counting(self, members: Sequence[str], store: dist.Store) -> list[str]:
        return [member for member in members if self.beats.is_counting(store, member) is not False]

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
        self._beats = meetings.beats
        self._waits_for = ""
        self._is_up_to_this = False
        meetings.store.ask(self._come, meetings.limit)

    def _come(self, store: dist.Store) -> None:
        self._number, self._place, self._former = self._meetings.come(store, self._own, self._contract)
        self._came: dict[int, _Came] = {}
        # When this process has come, the last one has, and the first of the former members has.
        self._since = self._last_came = time.monotonic()
        self._former_since: float | None = None

    def decision(self) -> _Decision:
        """Wait for it, and make it if that is up to this process."""
        has_said = False
        while (decision := self._meetings.store.ask(self._look, self._meetings.limit)) is None:
            if self._is_up_to_this:
                others = [member for member in self._concerned if member != self._own.member]
                signs = self._meetings.feel(self._feeler, others)
                self._meetings.store.ask(functools.partial(self._decide, signs), self._meetings.limit)
            if not has_said and time.monotonic() - self._since > _SILENCE:
                has_said = True
                _logger.warning("bagua.elastic waits for %s", self._waits_for)
            time.sleep(_PAUSE if len(self._came) < _FEW or self._is_up_to_this else _LONG_PAUSE)
        self._meetings.take(self._number, decision)
        return decision

    def _look(self, store: dist.Store) -> _Decision | None:
        """See what was decided, who has come, and whether it is up to this process to decide."""
        # A refusal is written before the decision.
        if store.check([self._refusal(self._place)]):
            is_for_contract, reason = json.loads(store.get(self._refusal(self._place)))
            raise (ValueError if is_for_contract else RuntimeError)(reason)
        if store.check([f"{self._number}/decision"]):
            decision: _Decision = json.loads(store.get(f"{self._number}/decision"))
            return decision
        if not store.check([f"{self._number}/is_here/{self._own.member}"]):
            # The store has been served anew meanwhile.
            self._come(store)
        self._see_who_came(store)
        before = sorted(place for place in self._places.values() if place < self._place)
        decides = next((place for place in before if self._is_at_work(store, place)), None)
        self._is_up_to_this = decides is None
        if decides is not None:
            self._waits_for = f"the decision of the process at {_place(self._came[decides].member)}"
        return None

    def _is_at_work(self, store: dist.Store, place: int) -> bool:
        """Whether one who has come may decide. One that counts no more is dead, stopped, or without the store."""
        is_counting = self._beats.is_counting(store, self._came[place].member)
        return is_counting is not False and not store.check([self._refusal(place)])

    def _refusal(self, place: int) -> str:
        return f"{self._number}/refused/{place}"

    @property
    def _places(self) -> dict[str, int]:
        """Where each one has come last: after a refusal it may come again, with another contract."""
        return {self._came[place].member: place for place in sorted(self._came)}

    @property
    def _concerned(self) -> list[str]:
        """All who have come, and the former members."""
        return list(dict.fromkeys([*self._former, *(one.member for one in self._came.values())]))

    def _see_who_came(self, store: dist.Store) -> None:
        for place in range(1, store.add(f"{self._number}/count", 0) + 1):
            key = f"{self._number}/came/{place}"
            if place not in self._came and store.check([key]):
                self._came[place] = _Came(*json.loads(store.get(key)))
                self._last_came = time.monotonic()
                if self._former_since is None and self._came[place].member in self._former:
                    self._former_since = self._last_came

    def _decide(self, signs: dict[str, Sign], store: dist.Store) -> None:
        """Write down who goes on, the former members first, once nobody is waited for."""
        # Others may have come while a silent host was waited for.
        self._see_who_came(store)
        now = time.monotonic()
        came = {member: self._came[place] for member, place in self._places.items()}
        if not came.keys() <= {self._own.member, *signs}:
            return  # Nothing is known yet of a newcomer.
        counting = {member: self._beats.is_counting(store, member) for member in signs}
        is_patient = self._former_since is None or now - self._former_since < self._meetings.patience
        if self._own.member not in self._former:
            # The members go on without a newcomer that does not reach all of them.
            cut_off = (m for m in self._former if m in came and counting[m] and signs[m] is not Sign.LIVES)
            other = next(cut_off, None)
            if other is not None:
                store.set(self._refusal(self._place), json.dumps(_apart(self._own.member, other)))
                return
        for member in self._former:
            if member != self._own.member and self._is_waited_for(
                signs[member], counting[member], is_patient=is_patient, is_missing=member not in came
            ):
                self._waits_for = f"the member at {_place(member)}"
                return
        present = [m for m in self._former if m in came] + [m for m in came if m not in self._former]
        present = [m for m in present if m == self._own.member or counting[m] is not False]
        # A newcomer of whom nothing has been seen but that it came may come again.
        present = [m for m in present if m == self._own.member or counting[m] or signs[m] is Sign.LIVES]
        apart = [{self._own.member, m} for m in present if m != self._own.member and signs[m] is not Sign.LIVES]
        apart += [{one.member, other} for one in came.values() for other in one.unreached]
        refused = _refuse_the_cut_off(present, apart)
        for member in present:
            if came[member].contract != came[present[0]].contract:
                refused[member] = _difference(store, (present[0], came[present[0]]), (member, came[member]))
        for member, refusal in refused.items():
            store.set(self._refusal(self._places[member]), json.dumps(refusal))
        members = [member for member in present if member not in refused]
        # A newcomer does not stop those who train with fewer.
        asking = [member for member in members if member in self._former] or members
        at_least = max((came[member].at_least for member in asking), default=1)
        if len(members) < at_least:
            self._waits_for = f"more members than {len(members)}: at_least={at_least}"
            return
        are_new = any(member not in self._former for member in members)
        if not (are_new and now - self._last_came < _SETTLE):
            _write(store, self._number, {"uuid": secrets.randbits(62), "members": members})

    def _is_waited_for(self, sign: Sign, is_counting: bool | None, *, is_patient: bool, is_missing: bool) -> bool:
        """Whether nobody may go on yet for the sake of a former member."""
        # Who was no member must not take members for dead where only it cannot reach them.
        if is_missing and sign is Sign.ENDED and self._own.member in self._former:
            return False
        if is_counting is None and sign is not Sign.LIVES:
            return True
        is_well = not is_missing and sign is Sign.LIVES and is_counting is not False
        is_dead = sign is not Sign.LIVES and is_counting is False
        return is_patient and not is_well and not is_dead


def _write(store: dist.Store, number: int, decision: _Decision) -> None:
    # Another one may have decided, where this process seemed to be dead.
    decided = json.loads(store.compare_set(f"{number}/decision", "", json.dumps(decision)))
    store.set("latest", json.dumps([number + 1, decided["uuid"]]))


class _Refusal(NamedTuple):
    """Why one who has come cannot be a member."""

    is_for_contract: bool
    reason: str


def _refuse_the_cut_off(present: list[str], apart: Sequence[set[str]]) -> dict[str, _Refusal]:
    """Take out of `present` as many as it needs so that the rest reach each other: those apart from most, the last."""
    refused: dict[str, _Refusal] = {}
    while pairs := [pair for pair in apart if pair <= set(present)]:
        worst = max(reversed(present), key=lambda member: sum(member in pair for pair in pairs))
        other = next(iter(next(pair for pair in pairs if worst in pair) - {worst}))
        present.remove(worst)
        refused[worst] = _apart(worst, other)
    return refused


def _apart(member: str, other: str) -> _Refusal:
    reason = (
        f"bagua.elastic: this process ({_place(member)}) and a member ({_place(other)}) both reach the store in which "
        "the members meet, but not each other"
    )
    return _Refusal(is_for_contract=False, reason=reason)


def _difference(store: dist.Store, first: tuple[str, _Came], other: tuple[str, _Came]) -> _Refusal:
    contracts = [store.get(f"contract/{came.contract}").decode().split("\n") for _, came in (first, other)]
    lines = itertools.zip_longest(*contracts, fillvalue="nothing more")
    expected, got = next((one, another) for one, another in lines if one != another)
    reason = (
        f"bagua.elastic: this process ({_place(other[0])}) cannot train together with the members "
        f"({_place(first[0])}). They have {expected}; this one has {got}"
    )
    return _Refusal(is_for_contract=True, reason=reason)


def _place(member: str) -> str:
    address, port = address_of(member)
    return f"{address} port {port}"
