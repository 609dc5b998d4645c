# SPDX-License-Identifier: Apache-2.0
"""Replicas under torchft's Manager: processes that train, and die."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SECONDS = 120

# What takes its time is imported beforehand: the other replicas take no more than a hundred steps.
_HELD = """
import runpy, torch, torchft, bagua.torchft
print("ready", flush=True)
input()
runpy.run_path({script!r}, run_name="__main__")
"""


class Replica:
    """A process that waits to be started, a host by itself."""

    def __init__(self, script: Path, number: int, lighthouse: str, log: Path, **environment: str) -> None:
        environment |= {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA": str(number), "OMP_NUM_THREADS": "1"}
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _HELD.format(script=str(script))],
                env={**os.environ, "BAGUA_HOST_ID": log.name, **environment},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.close()

    def steps_with(self, replicas: int) -> list[int]:
        return [int(step) for step in re.findall(rf"^step (\d+): {replicas} replicas", self.log.read_text(), re.M)]

    def wait_until_ready(self) -> None:
        self.wait_until(lambda: "ready\n" in self.log.read_text())

    def wait_for_steps_with(self, replicas: int, count: int) -> None:
        self.wait_until(lambda: len(self.steps_with(replicas)) >= count)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < end, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)


def end(replicas: Iterable[Replica]) -> None:
    for replica in replicas:
        if replica.process.poll() is None:
            replica.process.kill()
            replica.process.wait()
