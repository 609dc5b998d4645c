# SPDX-License-Identifier: Apache-2.0
"""`register_comm_hook(manager=)` under torchft's own Manager: three replicas, of which one is lost and comes back.

The same with torchft's own DDP, over a bagua group alone.
"""

import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: make test-engines")
from replicas import SECONDS, Replica, end
from torchft.coordination import LighthouseServer

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parent / "managed_training.py"
STEP = re.compile(r"^step (\d+): (\d) replicas, ([0-9a-f]{64})", re.M)
# Of the Manager, in seconds; that of the group is torch's, ten minutes.
TIMEOUT = 5
DIES_AFTER = 20


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    yield server.address()
    server.shutdown()


def _logs(replicas: Sequence[Replica]) -> str:
    return "\n".join(f"{replica.log.name}: {replica.log.read_text()[-4000:]}" for replica in replicas)


def _check_weights(replicas: Sequence[Replica], steps: int) -> None:
    """All replicas that have taken a step have the same bits after it."""
    digests: dict[int, set[str]] = {}
    for replica in replicas:
        for step, _, digest in STEP.findall(replica.log.read_text()):
            digests.setdefault(int(step), set()).add(digest)
    assert sorted(digests) == list(range(1, steps + 1)), _logs(replicas)
    assert {step for step, different in digests.items() if len(different) > 1} == set(), _logs(replicas)


@pytest.mark.parametrize("hook", [{"ALGORITHM": "gradient_allreduce"}, {"ALGORITHM": "bytegrad"}, {}], ids=str)
def test_a_replica_dies_in_a_backward_and_comes_back(hook: dict[str, str], lighthouse: str, tmp_path: Path) -> None:
    steps = 150
    environment = {"STEPS": str(steps), **hook}
    replicas = [Replica(SCRIPT, i, lighthouse, tmp_path / f"{i}", **environment) for i in range(2)]
    replicas.append(Replica(SCRIPT, 2, lighthouse, tmp_path / "2", DIES_AFTER=str(DIES_AFTER), **environment))
    replicas.append(Replica(SCRIPT, 2, lighthouse, tmp_path / "healed", **environment))
    first, second, dies, healed = replicas
    try:
        for replica in replicas:
            replica.wait_until_ready()
        for replica in (first, second, dies):
            replica.start()
        assert dies.process.wait(SECONDS) == -signal.SIGKILL, _logs(replicas)
        first.wait_for_steps_with(2, 10)
        healed.start()
        ends = [replica.process.wait(SECONDS) for replica in (first, second, healed)]
    finally:
        end(replicas)
    assert ends == [0, 0, 0], _logs(replicas)
    _check_weights(replicas, steps)
    assert len(set(first.steps_with(3)) & set(healed.steps_with(3))) > 5, _logs(replicas)


def test_a_replica_that_is_stopped_is_waited_for_no_longer_than_the_manager_says(
    lighthouse: str, tmp_path: Path
) -> None:
    steps = 200
    replicas = [
        Replica(SCRIPT, i, lighthouse, tmp_path / f"{i}", ALGORITHM="bytegrad", STEPS=str(steps), TIMEOUT=str(TIMEOUT))
        for i in range(3)
    ]
    first, _, stopped = replicas
    try:
        for replica in replicas:
            replica.wait_until_ready()
        for replica in replicas:
            replica.start()
        first.wait_for_steps_with(3, 10)
        stopped.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        first.wait_for_steps_with(2, 10)
        waited = time.monotonic() - began
        stopped.process.send_signal(signal.SIGCONT)
        ends = [replica.process.wait(SECONDS) for replica in replicas]
    finally:
        end(replicas)
    assert ends == [0, 0, 0], _logs(replicas)
    # Twice: the lighthouse takes as long, five seconds, to believe that a replica has gone.
    assert waited < 3 * TIMEOUT + 10, _logs(replicas)
    _check_weights(replicas, steps)
    assert max(stopped.steps_with(3)) > max(first.steps_with(2)), _logs(replicas)
