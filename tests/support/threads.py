# SPDX-License-Identifier: Apache-2.0
"""The threads of this process."""

from pathlib import Path


def threads() -> list[str]:
    """Return the names of all threads, sorted: also of those that Gloo, torch or Python have started."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended in between, before its file was opened or after
    return sorted(names)


def bagua_threads() -> list[str]:
    """Return the names of the threads that bagua has started for groups, sorted: not that of the process's sockets."""
    return [name for name in threads() if name.startswith("bagua") and name != "bagua_wire"]
