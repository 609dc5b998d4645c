# SPDX-License-Identifier: Apache-2.0
"""The threads of this process."""

from collections.abc import Iterator
from pathlib import Path


def bagua_threads() -> list[str]:
    """Return the names of the threads that bagua has started, sorted."""
    return sorted(name for name in _names() if name.startswith("bagua"))


def _names() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        try:
            yield (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended in between, before its file was opened or after
