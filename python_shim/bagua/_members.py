# SPDX-License-Identifier: Apache-2.0
"""The default process group, whose members come and go."""

from __future__ import annotations

import contextlib
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
from bagua._pulse import Feeler, Pulse, Sign
from bagua._torch_private import barrier, default_group, reconfigure, reconfigure_handle

_logger = logging.getLogger("bagua")
# Seconds.
_LOOK = 0.2


class MemberGroup:
    """The default group: of this process alone at first."""

    def __init__(self, store: dist.Store, at_least: int, timeout: timedelta, patience: timedelta) -> None:
        dist.init_process_group(
            "bagua", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, enable_reconfigure=True
        )
        self._pulse = Pulse(reconfigure_handle())
        # Whom this process could not reach at the last change.
        self._unreached: list[str] = []
        self.members: list[str] = []
        self._become(secrets.randbits(62), [self._pulse.name])
        self._timeout = timeout
        self._meetings = Meetings(store, self._pulse.name, at_least, patience, timeout)
        self._someone = threading.Event()
        self._is_over = threading.Event()
        self._counter = threading.Thread(target=self._count, name="bagua_elastic", daemon=True)
        self._counter.start()

    def meet(self, contract: Sequence[str]) -> None:
        """Go on with those who live. Collective.

        Args:
            contract: what has to be the same on all members, line by line.

        Raises:
            DistError: one of them died meanwhile: meet again.
            ValueError: this process has another contract than the others.
            RuntimeError: it cannot reach one of the others, or not the store.
        """
        uuid, members = self._meetings.meet(contract, self._unreached)
        self._someone.clear()
        self._become(uuid, members)

    def fail(self) -> None:
        """Have the operations fail in which others wait for this process, as one has failed here."""
        default_group().abort()

    def ask(self) -> tuple[Tensor, dist.Work]:
        """Begin to tell each other whether someone waits: the first member looks, and all learn of it in one step."""
        flag = torch.tensor([int(self._someone.is_set())], device="cpu")
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        return flag, work

    def wait_for_all(self) -> None:
        """Return when all members have called this. Collective."""
        barrier(default_group(), self._timeout)

    def close(self) -> None:
        """Leave the others."""
        self._is_over.set()
        self._counter.join()
        # Without it the others take a process for dead that is gone.
        with contextlib.suppress(RuntimeError):
            self._meetings.leave()
        dist.destroy_process_group()
        self._pulse.stop()

    def _become(self, uuid: int, members: Sequence[str]) -> None:
        has_met = threading.Event()
        self._unreached = []
        watch = threading.Thread(target=self._watch, args=(members, has_met), daemon=True)
        watch.start()
        try:
            reconfigure(uuid, [member.partition(":")[2] for member in members])
        finally:
            has_met.set()
            watch.join()
        self.members = list(members)

    def _watch(self, members: Sequence[str], has_met: threading.Event) -> None:
        """End a change that waits for one who cannot be reached."""
        with Feeler() as feeler:
            while not has_met.wait(_LOOK):
                signs = feeler.signs(members)
                self._unreached = [member for member in members if signs[member] is not Sign.LIVES]
                if self._unreached and not has_met.is_set():
                    default_group().abort()
                    return

    def _count(self) -> None:
        """Let the others see that this process reaches the store; the first member looks whether someone waits."""
        is_away = False
        while not self._is_over.wait(BEAT):
            try:
                self._meetings.store.ask(lambda store: store.add(beat_key(self._pulse.name), 1), timedelta(0))
                if dist.get_rank() == 0 and not self._someone.is_set() and self._meetings.is_needed():
                    self._someone.set()
                is_away = False
            except RuntimeError as error:
                # The training goes on, with the members that there are.
                if not is_away:
                    _logger.warning("%s", error)
                is_away = True
                self._meetings.store.connect_again()
