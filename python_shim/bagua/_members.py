# SPDX-License-Identifier: Apache-2.0
"""The default process group, whose members come and go."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bagua._meeting_store import BEAT, beat_key
from bagua._meetings import Meetings
from bagua._pulse import Feeler, Pulse, Sign, handle_of
from bagua._torch_private import barrier, default_group, reconfigure, reconfigure_handle

_logger = logging.getLogger("bagua")
# Seconds. A thread that asks a store which does not answer is left behind.
_LOOK = 0.2
_END = 1.0
_TURNS = 20


def is_of_operation(error: BaseException) -> bool:
    """Whether an operation has raised an error: its name begins the text."""
    return str(error).startswith("bagua")


class MemberGroup:
    """The default group: of this process alone at first."""

    def __init__(self, store: dist.Store, at_least: int, timeout: timedelta, patience: timedelta) -> None:
        with contextlib.ExitStack() as undo:
            dist.init_process_group(
                "bagua", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, enable_reconfigure=True
            )
            undo.callback(dist.destroy_process_group)
            self._pulse = Pulse(reconfigure_handle())
            undo.callback(self._pulse.stop)
            # Those that there are, and the number of the meeting that has made them the members.
            self.become_alone()
            self.uuid = 0
            self._timeout = timeout
            self._meetings = Meetings(store, self._pulse.name, at_least, patience, timeout)
            undo.callback(self._meetings.store.close)
            self._is_someone_waiting = threading.Event()
            self._is_over = threading.Event()
            self._counter = threading.Thread(target=self._count, name="bagua_elastic", daemon=True)
            self._counter.start()
            undo.pop_all()

    @property
    def name(self) -> str:
        """What this process is called among the members."""
        return self._pulse.name

    def meet(self, contract: Sequence[str]) -> None:
        """Go on with those who live: see `Meetings.meet`. Collective. DistError: one of them died meanwhile."""
        uuid, members = self._meetings.meet(contract, self._unreached)
        self._is_someone_waiting.clear()
        self._become(uuid, members)
        self.uuid = uuid

    def become_alone(self) -> None:
        """Have the group consist of this process."""
        self._become(secrets.randbits(62), [self._pulse.name])

    def abort(self) -> None:
        """Have the operations fail in which others wait for this process, as one has failed here."""
        default_group().abort()

    def ask(self, seconds: float) -> tuple[Tensor, dist.Work]:
        """Begin to tell each other whether someone waits, and what a step has taken: all learn of it in one step.

        Returns:
            Whether someone waits, for which the first member looks, and the most of the seconds; when the work is done.
        """
        votes = torch.tensor([float(self._is_someone_waiting.is_set()), seconds], dtype=torch.float64, device="cpu")
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        return votes, work

    def wait_for_all(self) -> None:
        """Return when all members have called this. Collective."""
        barrier(default_group(), self._timeout)

    def close(self) -> None:
        """Leave the others, also where the store does not answer."""
        self._is_over.set()
        dist.destroy_process_group()
        self._pulse.stop()
        self._counter.join(_END)
        self._meetings.store.close()

    def _become(self, uuid: int, members: Sequence[str]) -> None:
        has_met = threading.Event()
        # This process could not reach these at the last change.
        self._unreached: list[str] = []
        self.members = list(members)
        watch = threading.Thread(target=self._watch, args=(members, has_met), daemon=True)
        watch.start()
        try:
            reconfigure(uuid, [handle_of(member) for member in members])
        finally:
            has_met.set()
            watch.join()

    def _watch(self, members: Sequence[str], has_met: threading.Event) -> None:
        """End a change that waits for one who cannot be reached."""
        try:
            with Feeler() as feeler:
                while not has_met.wait(_LOOK) and not self._unreached:
                    signs = feeler.signs(members)
                    self._unreached = [member for member in members if signs[member] is not Sign.LIVES]
        finally:
            # After an error of its own, too: nobody would end the change.
            if not has_met.is_set():
                default_group().abort()

    def _count(self) -> None:
        """Let the others see that this process reaches the store; the first member looks whether someone waits."""
        is_away = False
        turns = itertools.cycle(range(_TURNS))
        while not self._is_over.wait(BEAT):
            try:
                self._meetings.store.ask(lambda store: store.add(beat_key(self._pulse.name), 1), timedelta(0))
                # The first one looks often, the others in case that it does not reach the store.
                looks = dist.is_initialized() and (dist.get_rank() == 0 or next(turns) == 0)
                if looks and not self._is_someone_waiting.is_set() and self._meetings.is_needed():
                    self._is_someone_waiting.set()
                is_away = False
            except Exception as error:
                # The training goes on, with the members that there are.
                if not is_away and not self._is_over.is_set():
                    _logger.warning("%s", error)
                is_away = True
