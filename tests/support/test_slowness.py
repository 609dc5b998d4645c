# SPDX-License-Identifier: Apache-2.0
"""A process that waits is told from one that computes or that has no processor."""

import os
import subprocess
import sys
import time

from slowness import Moment, ends_of, seconds_asleep, slowness

_WAITS = "import time; time.sleep(1)"
_COMPUTES = "import time\nwhile time.thread_time() < 1: pass"


def _asleep(codes: list[str]) -> list[float]:
    """Of processes that share one processor."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        begin = Moment(time.monotonic(), 0.0)
        processes = [subprocess.Popen([sys.executable, "-c", code], text=True) for code in codes]
        asleep = [seconds_asleep(begin, end) for end in ends_of([process.pid for process in processes], 60.0)]
        assert [process.wait() for process in processes] == [0] * len(codes)
    finally:
        os.sched_setaffinity(0, cores)
    return asleep


def test_a_process_that_waits_is_asleep_and_one_that_lacks_a_processor_is_not() -> None:
    waiting, *computing = _asleep([_WAITS, _COMPUTES, _COMPUTES, _COMPUTES])
    assert waiting > 0.9
    # What three of them took on one processor, each has seen pass, and none has waited for anything but that.
    assert max(computing) < 0.9


def test_a_machine_that_others_use_is_slower() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        time.sleep(0.5)
        assert slowness(0.3) > 2.0
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
