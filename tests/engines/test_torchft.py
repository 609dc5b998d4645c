# SPDX-License-Identifier: Apache-2.0
"""torchft's Manager over `bagua.torchft.ProcessGroupBagua`: replicas die and come back."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


class _Replica:
    def __init__(self, number: int, address: str, log: Path) -> None:
        environment = {"TORCHFT_LIGHTHOUSE": address, "REPLICA": str(number), "PAUSE": "0.1", "OMP_NUM_THREADS": "1"}
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT)], env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT
            )

    def steps_with(self, replicas: int) -> list[int]:
        return [int(step) for step in re.findall(rf"^step (\d+): {replicas} replicas", self.log.read_text(), re.M)]

    def wait_for_steps_with(self, replicas: int, count: int) -> None:
        end = time.monotonic() + SECONDS
        while len(self.steps_with(replicas)) < count:
            assert time.monotonic() < end, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)


def test_a_replica_is_killed_and_heals(tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    replicas: list[_Replica] = []
    try:
        replicas += [_Replica(number, lighthouse.address(), tmp_path / f"{number}") for number in (0, 1)]
        replicas[0].wait_for_steps_with(2, 10)
        replicas[1].process.send_signal(signal.SIGKILL)
        replicas[1].process.wait()
        replicas[0].wait_for_steps_with(1, 3)
        healed = _Replica(1, lighthouse.address(), tmp_path / "healed")
        replicas.append(healed)
        assert [replica.process.wait(SECONDS) for replica in (replicas[0], healed)] == [0, 0], (
            replicas[0].log.read_text() + healed.log.read_text()
        )
    finally:
        for replica in replicas:
            if replica.process.poll() is None:
                replica.process.kill()
                replica.process.wait()
        lighthouse.shutdown()
    # The one that came back went on where the other was, with its weights.
    assert healed.steps_with(2)[0] > 10
    ends = [re.findall(r"^weights (\S+)", replica.log.read_text(), re.M) for replica in (replicas[0], healed)]
    assert ends[0] == ends[1] != []
