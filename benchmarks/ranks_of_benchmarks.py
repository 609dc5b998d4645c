# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a benchmark and waits for them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A process to start."""

    arguments: list[str]
    environment: Mapping[str, str]


def run_all(commands: Sequence[Command], limit: float, *, is_captured: bool) -> str:
    """Run all at the same time, for `limit` seconds at most; return what the first printed, where it is captured.

    Raises:
        RuntimeError: one of them failed.
        subprocess.TimeoutExpired: they took longer. None of them is left behind.
    """
    processes = []
    for index, command in enumerate(commands):
        own = subprocess.PIPE if is_captured else None
        output = own if index == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command.arguments, env=command.environment, stdout=output, text=True))
    try:
        text, _ = processes[0].communicate(timeout=limit)
        codes = [process.wait(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"a rank of the benchmark failed, see above (exit codes {codes})")
    return text or ""


def lines_of_the_first(commands: Sequence[Command], limit: float) -> list[dict[str, Any]]:
    """Run all as `run_all` does; return the lines of JSON that the first prints."""
    text = run_all(commands, limit, is_captured=True)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
