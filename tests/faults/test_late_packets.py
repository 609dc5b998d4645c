# SPDX-License-Identifier: Apache-2.0
"""Hosts whose packets come seconds late. On emulated hosts: needs root and iproute2.

In a file of its own, as a process makes emulated hosts of one network at a time.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bagua.bench.emulated_hosts import Host, Network
from test_disconnects import GRACE, LONG_TIMEOUT, TIMEOUT, WORKLOADS, _ends, _killed_at_the_end, _messages, _start
from trouble import SLACK_SECONDS, selection
from two_hosts import hosts_over


class Distance:
    """What lies between two hosts, which can hold back all that is on its way."""

    def __init__(self) -> None:
        # The program is a child of this process.
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        (self._program,) = (
            int(child) for child in children if Path(f"/proc/{child}/comm").read_text().startswith("emulated_net")
        )

    def hold_for(self, seconds: float) -> None:
        os.kill(self._program, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(self._program, signal.SIGCONT)


@pytest.fixture
def distant_hosts() -> Iterator[list[Host]]:
    with hosts_over(Network(1e9, 0.01)) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["bytegrad", "ring of messages"]))
def test_packets_that_are_seconds_late_cost_only_time(workload: str, distant_hosts: list[Host]) -> None:
    ranks = _start(distant_hosts, 5.0, LONG_TIMEOUT, workload)
    with _killed_at_the_end(ranks):
        Distance().hold_for(3.0)
        texts = _ends(ranks)
    assert texts == ["done\n"] * len(distant_hosts)


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["all_reduce"]))
def test_packets_that_are_later_than_the_timeout_are_an_error_on_both_sides(
    workload: str, distant_hosts: list[Host]
) -> None:
    ranks = _start(distant_hosts, 600.0, workload=workload)
    with _killed_at_the_end(ranks):
        begun = time.monotonic()
        Distance().hold_for(TIMEOUT + GRACE)
        texts = _ends(ranks)
    messages = _messages(texts, begun + TIMEOUT + GRACE + SLACK_SECONDS)
    # Rank 0 holds the store; the other cannot ask for the cause before the packets go on.
    assert "rank 1 (does not answer" in messages[0]
