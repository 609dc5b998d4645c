# SPDX-License-Identifier: Apache-2.0
"""How processes find out who the members of a group are, where some die and others join."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from bagua._torch_private import default_group, reconfigure, reconfigure_handle

_logger = logging.getLogger("bagua")
# Seconds.
_PROBE = 3.0
_PAUSE = 0.02
_LOOK = 0.2
# Those who start at the same moment come within this time.
_SETTLE = 0.3


class _Pulse:
    """By which the others see that this process lives: its kernel takes connections, and nothing is said in them.

    Not by the port that is in its reconfigure handle: the server there does not get over connections without a word.
    """

    def __init__(self, handle: str) -> None:
        address = handle.split(":", 4)[4]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        # A member's name: what is_alive() has to know, and the handle.
        self.name = f"{self._socket.getsockname()[1]}:{handle}"
        self._thread = threading.Thread(target=self._accept, name="bagua_pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()


def is_alive(member: str) -> bool:
    """Whether the process of a member still lives."""
    port, _, _, _, _, address = member.split(":", 5)
    try:
        socket.create_connection((address, int(port)), _PROBE).close()
    except OSError:
        return False
    return True


class _Decision(TypedDict):
    uuid: int
    members: list[str]


class Meetings:
    """A store in which those who live agree on who the members are, as often as that changes.

    Meetings are numbered. Whoever wants a change comes to the first that has not ended: a process that joins, and all
    members once they know of it, or of a death. The first of those who have come decides, once all former members have
    come that live, and writes down who goes on. If it dies meanwhile the next one does. A member that is stopped is
    waited for as long as `patience` says, from when another one has come; it may join later.
    """

    def __init__(self, store: dist.Store, own: str, at_least: int, patience: timedelta) -> None:
        self._store = dist.PrefixStore("bagua_elastic", store)
        self._own = own
        self._at_least = at_least
        self._patience = patience.total_seconds()
        self._number = 0

    def meet(self) -> tuple[int, list[str]]:
        """Return a number that no other meeting has, and the members, this process among them."""
        while True:
            with self._explained():
                number = self._first_open()
                place = self._store.add(f"{number}/count", 1)
                self._store.set(f"{number}/came/{place}", self._own)
                decision = self._await_decision(number, place)
                self._number = number + 1
            if self._own in decision["members"]:
                return decision["uuid"], decision["members"]

    def has_someone_come(self) -> bool:
        """Whether someone waits for the members."""
        with self._explained():
            return self._store.check([f"{self._number}/came/1"])

    def leave(self) -> None:
        """Tell the others that this process goes, though it lives."""
        self._store.set(f"left/{self._own}", "")

    def _first_open(self) -> int:
        if self._store.check(["latest"]):
            self._number = max(self._number, int(self._store.get("latest")))
        while self._store.check([f"{self._number}/decision"]):
            self._number += 1
        return self._number

    def _await_decision(self, number: int, place: int) -> _Decision:
        former = self._decision(number - 1)["members"] if number > 0 else []
        # When this many had come, and when the first of the former members.
        known, since, former_since = 0, time.monotonic(), None
        while not self._store.check([f"{number}/decision"]):
            time.sleep(_PAUSE)
            came = self._came(number)
            now = time.monotonic()
            if len(came) != known:
                known, since = len(came), now
            if former_since is None and any(member in came.values() for member in former):
                former_since = now
            if any(is_alive(member) for earlier, member in came.items() if earlier < place):
                continue
            has_patience = former_since is None or now - former_since < self._patience
            members = self._members(former, list(came.values()), has_patience=has_patience)
            are_new = any(member not in former for member in members)
            if len(members) >= self._at_least and not (are_new and now - since < _SETTLE):
                self._decide(number, members)
        return self._decision(number)

    def _came(self, number: int) -> dict[int, str]:
        places = range(1, self._store.add(f"{number}/count", 0) + 1)
        keys = {place: f"{number}/came/{place}" for place in places}
        return {place: self._store.get(key).decode() for place, key in keys.items() if self._store.check([key])}

    def _members(self, former: Sequence[str], came: Sequence[str], *, has_patience: bool) -> list[str]:
        """Return those who go on, the former members first; nobody while one is waited for."""
        missing = [member for member in former if member not in came and not self._store.check([f"left/{member}"])]
        if has_patience and any(is_alive(member) for member in missing):
            return []
        ordered = [member for member in former if member in came]
        ordered += [member for member in dict.fromkeys(came) if member not in former]
        return [member for member in ordered if is_alive(member)]

    def _decide(self, number: int, members: Sequence[str]) -> None:
        decision = json.dumps({"uuid": secrets.randbits(62), "members": members})
        # Another one may have decided, where this process seemed to be dead.
        self._store.compare_set(f"{number}/decision", "", decision)
        self._store.set("latest", str(number + 1))

    def _decision(self, number: int) -> _Decision:
        decision: _Decision = json.loads(self._store.get(f"{number}/decision"))
        return decision

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise RuntimeError(
                "bagua.elastic: the store in which the members agree on who they are does not answer. Let it be served "
                f"by a process that outlives them, such as `python -m bagua.elastic`: {error}"
            ) from error


class MemberGroup:
    """The default group, whose members come and go: alone at first."""

    def __init__(self, store: dist.Store, at_least: int, timeout: timedelta, patience: timedelta) -> None:
        dist.init_process_group(
            "bagua", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, enable_reconfigure=True
        )
        handle = reconfigure_handle()
        self._pulse = _Pulse(handle)
        self._become(secrets.randbits(62), [self._pulse.name])
        self._timeout = timeout
        self._meetings = Meetings(store, self._pulse.name, at_least, patience)
        self._someone = threading.Event()
        self._is_over = threading.Event()
        self._looker = threading.Thread(target=self._look, name="bagua_elastic", daemon=True)
        self._looker.start()

    def meet(self) -> None:
        """Go on with those who live. Collective.

        Raises:
            DistError: one of them died meanwhile: meet again.
        """
        uuid, members = self._meetings.meet()
        self._someone.clear()
        self._become(uuid, members)

    def ask(self) -> tuple[Tensor, dist.Work]:
        """Begin to tell each other whether someone waits: the first member looks, and all learn of it in one step."""
        flag = torch.tensor([int(self._someone.is_set())], device="cpu")
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        return flag, work

    def close(self) -> None:
        """Leave the others."""
        self._is_over.set()
        self._looker.join()
        with contextlib.suppress(dist.DistError):
            self._meetings.leave()
        dist.destroy_process_group()
        self._pulse.stop()

    def _become(self, uuid: int, members: Sequence[str]) -> None:
        has_met = threading.Event()
        watch = threading.Thread(target=self._watch, args=(members, has_met), daemon=True)
        watch.start()
        try:
            reconfigure(uuid, [member.partition(":")[2] for member in members])
        finally:
            has_met.set()
            watch.join()

    def _watch(self, members: Sequence[str], has_met: threading.Event) -> None:
        """End a change that waits for one who has died."""
        while not has_met.wait(_LOOK):
            if not all(is_alive(member) for member in members):
                default_group().abort()
                return

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK):
            if dist.get_rank() != 0 or self._someone.is_set():
                continue
            try:
                if self._meetings.has_someone_come():
                    self._someone.set()
            except RuntimeError as error:
                # The training goes on, with the members that there are.
                _logger.warning("%s", error)
                return
