# SPDX-License-Identifier: Apache-2.0
"""Limits of time on a machine that others use too: what a process has waited for, and how slow the machine is.

The kernel knows how long a thread has computed and how long it was ready to and had no processor. The rest it was
asleep: it has waited for somebody or something, which no load on the machine makes longer than what it waits for.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


def busy_seconds(process: int | str = "self") -> float:
    """What the first thread of a process has computed, or has been ready to; also of one that nobody has reaped."""
    computed, ready, _ = Path(f"/proc/{process}/schedstat").read_text().split()
    return (int(computed) + int(ready)) / 1e9


class Moment(NamedTuple):
    """When something happened, and how long its process had been busy by then."""

    when: float
    busy: float


def ends_of(processes: Sequence[int], timeout: float) -> list[Moment]:
    """Wait for the end of children, which are aborted at the timeout, and leave it to others to reap them."""
    limit = time.monotonic() + timeout
    ends: dict[int, Moment] = {}
    while len(ends) < len(processes):
        for process in processes:
            if process in ends:
                continue
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                ends[process] = Moment(time.monotonic(), busy_seconds(process))
            elif time.monotonic() > limit:
                os.kill(process, signal.SIGABRT)
        time.sleep(0.01)
    return [ends[process] for process in processes]


def seconds_asleep(begin: Moment, end: Moment) -> float:
    """What a process has neither computed nor been ready to between two moments."""
    return end.when - begin.when - (end.busy - begin.busy)


def slowness(seconds: float = 0.1) -> float:
    """How many times as long as on an idle machine a thread takes for what it computes, here and now: 1 or more."""
    begin, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < seconds:
        pass
    return max(1.0, (time.monotonic() - begin) / (time.thread_time() - computed))
