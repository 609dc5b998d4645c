# SPDX-License-Identifier: Apache-2.0
"""A progress bar on the terminal, for runs that take longer than a few seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_SECONDS_BEFORE = 2.0
_SECONDS_BETWEEN = 0.2
_WIDTH = 30


class Progress:
    """Draws `[####....] 12/64 all_reduce, 30 s left` on a terminal, and nothing on a file."""

    def __init__(self, total: int, *, is_shown: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._is_shown = is_shown and self._stream.isatty()
        self._start = self._drawn = time.monotonic()
        self._done = 0.0

    def at(self, done: float, what: str) -> None:
        """Show that `done` of all steps are done, and which is at work."""
        now = time.monotonic()
        self._done = done
        if not self._is_shown or now - self._start < _SECONDS_BEFORE or now - self._drawn < _SECONDS_BETWEEN:
            return
        self._drawn = now
        bar = "#" * int(_WIDTH * done / self._total)
        left = (now - self._start) * (self._total / done - 1) if done else 0.0
        self._stream.write(f"\r\033[K[{bar:.<{_WIDTH}}] {int(done)}/{self._total} {what}, about {left:.0f} s left")
        self._stream.flush()

    def clear(self) -> None:
        """Take the bar away, for a line of output."""
        if self._is_shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
