# SPDX-License-Identifier: Apache-2.0
"""One rank of a soak: makes the calls of the plan, waits for them in an order of its own, checks every result."""

import os
import random
import threading
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from holdings import wait_for
from ranks import run_ranks
from soak_calls import start
from soak_parts import Side, Started
from soak_plan import Call, calls, members_of_groups
from threads import bagua_threads

_MOST_PENDING = 12

# How ranks are spread over emulated hosts. Between hosts sockets carry what shared memory carries inside one.
LAYOUTS = {
    "one host": lambda rank: "a",
    "two hosts": lambda rank: f"{rank % 2}",
    "an uneven pair": lambda rank: "a" if rank == 0 else "b",
    "a host each": lambda rank: f"{rank}",
}


class Outcome(NamedTuple):
    """What a rank tells when its soak is over."""

    process: int
    checked: int


class _Rank:
    def __init__(self, seed: int) -> None:
        self._rank = dist.get_rank()
        # Of this rank alone: which call is waited for next, and how.
        self._random = random.Random(f"waits {seed} {self._rank}")
        self._members = members_of_groups(seed, dist.get_world_size())
        self._sides: list[Side | None] = [None] * len(self._members)
        self._pending: list[Started] = []
        self.checked = 0
        for index in range(len(self._members)):
            self._make(index)

    def follow(self, seed: int, operations: int) -> None:
        for call in calls(seed, self._members, operations):
            if call.kind == "renew":
                self._finish_all()
                self._destroy(call.group)
                self._make(call.group)
            else:
                self._make_call(call)
        self._finish_all()
        for index in range(len(self._members)):
            self._destroy(index)

    def _make_call(self, call: Call) -> None:
        side = self._sides[call.group]
        if side is None:
            return
        try:
            started = start(call, side)
        except Exception as error:
            raise RuntimeError(f"rank {self._rank} could not make {call}") from error
        self._pending.append(started)
        while len(self._pending) > _MOST_PENDING or (self._pending and self._random.random() < 0.4):
            self._finish_one()

    def _finish_all(self) -> None:
        while self._pending:
            self._finish_one()

    def _finish_one(self) -> None:
        started = self._pending.pop(self._random.randrange(len(self._pending)))
        self._random.shuffle(started.works)
        try:
            for work in started.works:
                if self._random.random() < 0.2:
                    work.get_future().wait()
                else:
                    work.wait()
        except Exception as error:
            raise RuntimeError(f"rank {self._rank} waited for {started.call}") from error
        started.check()
        self.checked += 1

    def _make(self, index: int) -> None:
        ranks = self._members[index]
        group: Any = dist.new_group(ranks)
        if self._rank in ranks:
            self._sides[index] = Side(group, ranks, ranks.index(self._rank))

    def _destroy(self, index: int) -> None:
        side = self._sides[index]
        if side is None:
            return
        sums: list[Any] = [None] * side.size
        dist.all_gather_object(sums, side.checksum, side.group)
        if len(set(sums)) != 1:
            raise AssertionError(f"rounded results of group {side.ranks} differ between its ranks: {sums}")
        dist.destroy_process_group(side.group)
        self._sides[index] = None


def run(seed: int, operations: int, layout: str) -> Outcome:
    """Run the plan of `seed` on this rank."""
    before = bagua_threads()
    with mock.patch.dict(os.environ, BAGUA_HOST_ID=LAYOUTS[layout](dist.get_rank())):
        rank = _Rank(seed)
        rank.follow(seed, operations)
    # Those that ran callbacks are told to end, and nobody waits for them.
    if not wait_for(lambda: bagua_threads() == before):
        left = bagua_threads()
        raise AssertionError(f"threads were left behind: {left}, before the soak {before}; {threading.enumerate()}")
    return Outcome(os.getpid(), rank.checked)


def soak(world_size: int, seed: int, operations: int, layout: str, timeout: float) -> int:
    """Start `world_size` ranks, have them follow one plan, and return how many results were checked."""
    outcomes: list[Outcome] = run_ranks(
        world_size, run, seed, operations, layout, timeout=timeout, group_timeout=min(timeout, 120.0)
    )
    for outcome in outcomes:
        left = [path.name for path in Path("/dev/shm").glob(f"bagua-{outcome.process}-*")]
        if left:
            raise AssertionError(f"shared memory was left behind: {left}")
    return sum(outcome.checked for outcome in outcomes)
