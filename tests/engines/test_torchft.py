# SPDX-License-Identifier: Apache-2.0
"""torchft's Manager over `bagua.torchft.ProcessGroupBagua`: replicas die and come back."""

import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: make test-engines")
pytest.importorskip("parameterized", reason="torchft's own tests need it: make test-engines")
import torchft.process_group_test as of_torchft
from bagua.torchft import ProcessGroupBagua
from replicas import SECONDS, Replica, end
from torchft.coordination import LighthouseServer

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parents[2] / "examples" / "with_torchft.py"


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


def test_a_replica_is_killed_and_heals(tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    replicas: list[Replica] = []
    try:
        replicas += [
            Replica(SCRIPT, i, lighthouse.address(), tmp_path / name, PAUSE="0.1")
            for i, name in ((0, "0"), (1, "1"), (1, "healed"))
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
        end(replicas)
        lighthouse.shutdown()
    # The one that came back went on where the other was, with its weights.
    assert healed.steps_with(2), stays.log.read_text() + healed.log.read_text()
    assert healed.steps_with(2)[0] > 10
    ends = [re.findall(r"^weights (\S+)", replica.log.read_text(), re.M) for replica in (stays, healed)]
    assert ends[0] == ends[1] != []
