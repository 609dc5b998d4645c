# SPDX-License-Identifier: Apache-2.0
"""PyTorch's suite in a process of its own, asked for one test at a time.

The suite forks its ranks, which is safe only from a process without threads: pytest's is not one.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any


def _command(backend: str, world_size: int, suite: str) -> list[str]:
    script = Path(__file__).with_name("run_torch_suite.py")
    return [sys.executable, str(script), "--backend", backend, "--world-size", str(world_size), "--suite", suite]


def list_suite(suite: str) -> list[str]:
    """Names of the tests, whatever the number of ranks."""
    command = [*_command("bagua", 2, suite), "--list"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split()


class SuiteProcess:
    def __init__(self, backend: str, world_size: int, suite: str = "gloo") -> None:
        self._command = [*_command(backend, world_size, suite), "--serve"]
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, test: str) -> dict[str, Any]:
        """How the test ended: its outcome, reason, seconds and what the ranks printed. The suite limits its time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(test + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"{self._command} ended with status {self._process.wait()} instead of running {test}")
        outcome: dict[str, Any] = json.loads(reply)
        return outcome

    def __enter__(self) -> "SuiteProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
