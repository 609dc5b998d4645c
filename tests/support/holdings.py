# SPDX-License-Identifier: Apache-2.0
"""What this process holds of the system: threads, open files, sockets that listen."""

import gc
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from threads import threads

_LISTENING = "0A"
_SHARED_MEMORY = Path("/dev/shm")


class Holdings(NamedTuple):
    """In a form that compares, and that tells what is there too much."""

    threads: tuple[str, ...]
    files: tuple[str, ...]
    listening: tuple[int, ...]
    # Segments of shared memory that have a name, and those that are mapped.
    segments: tuple[str, ...]
    mapped: tuple[str, ...]


def holdings() -> Holdings:
    """Return what this process holds now, whoever has started or opened it."""
    files = _files()
    return Holdings(
        threads=tuple(threads()),
        # Sockets and pipes have numbers of their own: that there is one counts, not which.
        files=tuple(sorted(name.split(":")[0] for name in files)),
        listening=tuple(_listening(files)),
        segments=tuple(sorted(entry.name for entry in _SHARED_MEMORY.glob(f"bagua-{os.getpid()}-*"))),
        mapped=tuple(sorted(re.findall(r"/dev/shm/bagua-\S+", Path("/proc/self/maps").read_text()))),
    )


def more_than(before: Holdings) -> list[str]:
    """Return what this process holds beyond what it held before; less is no fault."""
    now = holdings()
    more = []
    for kind in Holdings._fields:
        left = list(getattr(now, kind))
        for one in getattr(before, kind):
            if one in left:
                left.remove(one)
        more += [f"{kind}: {one}" for one in left]
    return more


def left_behind(before: Holdings, seconds: float = 10.0) -> list[str]:
    """As more_than(), once nothing is left or the time is over: threads that nobody waits for end a moment later."""
    gc.collect()
    wait_for(lambda: not more_than(before), seconds)
    return more_than(before)


def resident_bytes() -> int:
    """What of this process is in memory."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Look until the condition holds or the time is over; return whether it holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def _files() -> list[str]:
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed in between, as the descriptor of this loop is
        # That of this loop.
        if not name.endswith("/fd"):
            names.append(name)
    return names


def _listening(files: list[str]) -> list[int]:
    own = {name.removeprefix("socket:[").removesuffix("]") for name in files if name.startswith("socket:[")}
    ports = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        # A machine may be without IPv6.
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in own:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)
