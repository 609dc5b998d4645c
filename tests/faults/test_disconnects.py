# SPDX-License-Identifier: Apache-2.0
"""Hosts that lose their network, for good or for a while, or whose connections to the store are reset.

On emulated hosts: needs root and iproute2.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bagua.bench.emulated_hosts import Host
from trouble import SLACK_SECONDS, same_cause, selection
from two_hosts import hosts_over, set_link

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("cut_off_rank.py")
WORKLOADS = ("all_reduce", "ring of messages", "barrier", "bytegrad", "low_precision_decentralized")
TIMEOUT = 4.0
# Of ranks that have to find out earlier, or have nothing to find out.
LONG_TIMEOUT = 60.0
# In which the ranks find out who is missing; a rank that does not reach the store either relies on its transport.
GRACE = 4.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with hosts_over(count=3) as made:
        yield made


@pytest.fixture(autouse=True)
def _links_are_up(hosts: list[Host]) -> Iterator[None]:
    yield
    for host in hosts:
        set_link(host, "up")


def _start(
    hosts: Sequence[Host], seconds: float, timeout: float = TIMEOUT, workload: str = "all_reduce"
) -> list[subprocess.Popen[str]]:
    ranks = []
    for rank, host in enumerate(hosts):
        arguments = [str(rank), str(len(hosts)), hosts[0].address, str(timeout), workload, str(seconds)]
        ranks.append(
            subprocess.Popen(
                host.command([sys.executable, str(SCRIPT), *arguments]),
                env={**host.environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests" / "support")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "working\n"
    return ranks


def _ends(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    # None ends before all have spoken.
    firsts = [rank.stdout.readline() if rank.stdout is not None else "" for rank in ranks]
    texts = [first + rank.communicate(timeout=120)[0] for first, rank in zip(firsts, ranks, strict=True)]
    assert all(rank.returncode == 0 for rank in ranks), texts
    return texts


@contextlib.contextmanager
def _killed_at_the_end(ranks: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _messages(texts: Sequence[str], before: float) -> list[str]:
    """Return the errors, which all ranks had before this time."""
    messages = []
    for text in texts:
        word, when, message = text.split(" ", 2)
        assert word == "error", text
        assert float(when) < before, text
        assert message.startswith("bagua:"), text
        messages.append(message.strip())
    return messages


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["all_reduce"]))
def test_a_network_that_is_gone_for_a_while_costs_only_time(workload: str, hosts: list[Host]) -> None:
    ranks = _start(hosts, 4.0, LONG_TIMEOUT, workload)
    with _killed_at_the_end(ranks):
        set_link(hosts[1], "down")
        time.sleep(1.0)
        set_link(hosts[1], "up")
        texts = _ends(ranks)
    assert texts == ["done\n"] * len(hosts)


@pytest.mark.parametrize("workload", selection(WORKLOADS, ["low_precision_decentralized"]))
def test_a_host_that_loses_its_network_is_an_error_at_the_timeout_on_both_sides(
    workload: str, hosts: list[Host]
) -> None:
    ranks = _start(hosts, 600.0, workload=workload)
    with _killed_at_the_end(ranks):
        set_link(hosts[2], "down")
        begun = time.monotonic()
        texts = _ends(ranks)
    messages = _messages(texts, begun + TIMEOUT + GRACE + SLACK_SECONDS)
    # Those that still reach the store, which rank 0 holds, name the one that does not.
    assert "rank 2 (does not answer" in same_cause(messages[:2])


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["ring of messages"]))
def test_an_outage_longer_than_the_timeout_is_an_error_of_all_ranks(workload: str, hosts: list[Host]) -> None:
    ranks = _start(hosts, 600.0, workload=workload)
    with _killed_at_the_end(ranks):
        set_link(hosts[2], "down")
        begun = time.monotonic()
        time.sleep(TIMEOUT + 0.5)
        set_link(hosts[2], "up")
        texts = _ends(ranks)
    messages = _messages(texts, begun + TIMEOUT + GRACE + SLACK_SECONDS)
    cause = same_cause(messages[:2])
    assert "rank 2 (does not answer" in cause
    # The one that was cut off hears of it if its connection to the store is back in time.
    assert messages[2].endswith(cause) or "The other ranks could not be told" in messages[2]


def _reset_connections_to_the_store(rank: subprocess.Popen[str]) -> int:
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    word, count = rank.stdout.readline().split()
    assert word == "reset"
    return int(count)


@pytest.mark.long
def test_connections_to_the_store_that_are_reset_cost_nothing(hosts: list[Host]) -> None:
    ranks = _start(hosts, 4.0)
    with _killed_at_the_end(ranks):
        assert _reset_connections_to_the_store(ranks[1]) > 0
        texts = _ends(ranks)
    assert texts == ["done\n"] * len(hosts)


@pytest.mark.long
def test_a_rank_finds_the_store_again_after_a_reset(hosts: list[Host]) -> None:
    ranks = _start(hosts, 600.0)
    with _killed_at_the_end(ranks):
        assert _reset_connections_to_the_store(ranks[1]) > 0
        set_link(hosts[2], "down")
        texts = _ends(ranks)
    # It tells and hears of what only the store can have told.
    messages = [text.split(" ", 2)[2].strip() for text in texts[:2]]
    assert "rank 2 (does not answer" in same_cause(messages)
