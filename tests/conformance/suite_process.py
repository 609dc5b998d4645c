# SPDX-License-Identifier: Apache-2.0
"""PyTorch's suite in a process of its own, asked for one test at a time.

The suite forks its ranks, which is safe only from a process without threads: pytest's is not one.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RunTest = Callable[[str], dict[str, Any]]


def _command(backend: str, world_size: int, suite: str) -> list[str]:
    script = Path(__file__).with_name("run_torch_suite.py")
    return [sys.executable, str(script), "--backend", backend, "--world-size", str(world_size), "--suite", suite]


def list_suite(suite: str) -> list[str]:
    """Names of the tests, whatever the number of ranks."""
    command = [*_command("bagua", 2, suite), "--list"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split()


@contextmanager
def suite_process(backend: str, world_size: int, suite: str) -> Iterator[RunTest]:
    """Start the suite; what it gives runs a test and returns its outcome, reason, seconds and what the ranks printed.

    The suite limits the time of a test.
    """
    command = [*_command(backend, world_size, suite), "--serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    requests, replies = process.stdin, process.stdout

    def run(test: str) -> dict[str, Any]:
        print(test, file=requests, flush=True)
        reply = replies.readline()
        if not reply:
            raise RuntimeError(f"{command} ended with status {process.wait()} instead of running {test}")
        outcome: dict[str, Any] = json.loads(reply)
        return outcome

    try:
        yield run
    finally:
        requests.close()
        replies.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
