# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a benchmark and waits for them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Command(NamedTuple):
    arguments: list[str]
    environment: Mapping[str, str]


def run_all(commands: Sequence[Command], limit: float, *, is_captured: bool) -> str:
    """Run all at the same time, for `limit` seconds at most; return what the first printed, where it is captured.

    Raises:
        RuntimeError: one of them failed.
        subprocess.TimeoutExpired: they took longer. None of them is left behind.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for index, command in enumerate(commands):
            own = subprocess.PIPE if is_captured else None
            output = own if index == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command.arguments, env=command.environment, stdout=output, text=True))
        text, _ = processes[0].communicate(timeout=limit)
        codes = [process.wait(timeout=60) for process in processes]
    finally:
        _end(processes)
    if any(codes):
        raise RuntimeError(f"a rank of the benchmark failed, see above (exit codes {codes})")
    return text or ""


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End those that still run; torchrun ends its ranks when it is told to."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lines_of_the_first(commands: Sequence[Command], limit: float) -> list[dict[str, Any]]:
    """Run all as `run_all` does; return the lines of JSON that the first prints."""
    text = run_all(commands, limit, is_captured=True)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
