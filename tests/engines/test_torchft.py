# SPDX-License-Identifier: Apache-2.0
"""torchft's Manager over `bagua.torchft.ProcessGroupBagua`: replicas die and come back."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: make test-engines")
pytest.importorskip("parameterized", reason="torchft's own tests need it: make test-engines")
import torchft.process_group_test as of_torchft
from bagua.torchft import ProcessGroupBagua
from torchft.coordination import LighthouseServer

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parents[2] / "examples" / "with_torchft.py"
SECONDS = 120


class _OfThreeThreads(of_torchft.MultiPgBaseTest):  # type: ignore[misc]
    """torchft's own tests of a group: each collective, and each after a rank has gone.

    The survivors' errors have to be among those that torchft knows ("Connection closed by peer", "timed out after").
    """

    __test__ = False
    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, backend: str) -> ProcessGroupBagua:
        return ProcessGroupBagua(timedelta(seconds=10))


@pytest.fixture(scope="module")
def of_three() -> Iterator[Any]:
    _OfThreeThreads.setUpClass()
    yield _OfThreeThreads("run")
    _OfThreeThreads.tearDownClass()


@pytest.mark.parametrize("collective", of_torchft._ALL_COLLECTIVES)
def test_collective(of_three: Any, collective: str) -> None:
    of_three._run_parallel(collective)


@pytest.mark.parametrize("collective", of_torchft._ALL_COLLECTIVES)
def test_collective_after_a_rank_has_gone(of_three: Any, collective: str) -> None:
    of_three._run_with_resiliency(collective)


# What takes its time is imported beforehand: the other replica takes no more than a hundred steps.
HELD = f"""
import runpy, torch, torchft, bagua.torchft
print("ready", flush=True)
input()
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


class _Replica:
    """A process that waits to be started."""

    def __init__(self, number: int, address: str, log: Path) -> None:
        environment = {"TORCHFT_LIGHTHOUSE": address, "REPLICA": str(number), "PAUSE": "0.1", "OMP_NUM_THREADS": "1"}
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HELD],
                env={**os.environ, **environment},
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
        self._wait_until(lambda: "ready\n" in self.log.read_text())

    def wait_for_steps_with(self, replicas: int, count: int) -> None:
        self._wait_until(lambda: len(self.steps_with(replicas)) >= count)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < end, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)


def test_a_replica_is_killed_and_heals(tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    replicas: list[_Replica] = []
    try:
        replicas += [
            _Replica(i, lighthouse.address(), tmp_path / name) for i, name in ((0, "0"), (1, "1"), (1, "healed"))
        ]
        stays, dies, healed = replicas
        for replica in replicas:
            replica.wait_until_ready()
        stays.start()
        dies.start()
        stays.wait_for_steps_with(2, 10)
        dies.process.send_signal(signal.SIGKILL)
        dies.process.wait()
        stays.wait_for_steps_with(1, 3)
        healed.start()
        assert [replica.process.wait(SECONDS) for replica in (stays, healed)] == [0, 0], (
            stays.log.read_text() + healed.log.read_text()
        )
    finally:
        for replica in replicas:
            if replica.process.poll() is None:
                replica.process.kill()
                replica.process.wait()
        lighthouse.shutdown()
    # The one that came back went on where the other was, with its weights.
    assert healed.steps_with(2), stays.log.read_text() + healed.log.read_text()
    assert healed.steps_with(2)[0] > 10
    ends = [re.findall(r"^weights (\S+)", replica.log.read_text(), re.M) for replica in (stays, healed)]
    assert ends[0] == ends[1] != []
