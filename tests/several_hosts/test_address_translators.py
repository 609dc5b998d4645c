# SPDX-License-Identifier: Apache-2.0
"""One of two ranks is behind a translator of addresses, where nobody reaches it unasked: it comes by itself."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from address_translator import Translator, behind_a_translator
from two_hosts import hosts_over

SCRIPT = Path(__file__).with_name("translated_rank.py")
STORE_PORT = 29400
# Ranks import torch, on cores that others use too.
SLACK_SECONDS = 8.0
# An idle connection is probed after the first, and given up after the second without an answer.
PROBE_SECONDS, PATIENCE_SECONDS = 3.0, 24.0
# More than a rank dials another in vain before it waits only for that one to come.
LATE_SECONDS = 4.0


class _Ranks:
    """Rank 0 outside, and rank 1 inside."""

    def __init__(self, processes: list["subprocess.Popen[str]"], translator: Translator) -> None:
        self.processes = processes
        self.translator = translator

    def do(self, what: str, late: float = 0.0) -> list[str]:
        """Return what each rank says of it; each is so many seconds later than the one before."""
        words = []
        for number, process in enumerate(self.processes):
            assert process.stdin is not None
            time.sleep(late * number)
            process.stdin.write(what + "\n")
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout is not None
            words.append(process.stdout.readline().strip())
        return words

    def seconds(self, what: str, late: float = 0.0) -> float:
        """Return how long it took."""
        words = self.do(what, late)
        assert not any(word.startswith("error") for word in words), words
        return max(map(float, words))

    def connections(self) -> int:
        """Return how many the rank inside has opened to the other one."""
        return sum(port != STORE_PORT for port in self.translator.opened)


@contextmanager
def _ranks() -> Iterator[_Ranks]:
    with hosts_over() as hosts, behind_a_translator(hosts) as (outside, inside, translator):
        processes = [
            subprocess.Popen(
                host.command([sys.executable, str(SCRIPT), str(rank), outside.address]),
                env={**host.environment(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate((outside, inside))
        ]
        try:
            yield _Ranks(processes, translator)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


@pytest.fixture
def ranks() -> Iterator[_Ranks]:
    with _ranks() as made:
        yield made


def test_it_is_enough_that_one_of_two_can_be_reached(ranks: _Ranks) -> None:
    for what in ("10", "1000000", "message"):
        ranks.seconds(what)
    assert ranks.connections() >= 1


def test_a_rank_is_waited_for_whose_address_refuses_and_that_is_late(ranks: _Ranks) -> None:
    ranks.translator.refuses = True
    # Both are there, and have exchanged nothing.
    ranks.seconds("0")
    assert LATE_SECONDS - 1 < ranks.seconds("10", LATE_SECONDS) < LATE_SECONDS + SLACK_SECONDS


# The kernel's limit for an idle connection counts from its last sign of life, not from the cut.
@pytest.mark.long
@pytest.mark.parametrize("idle", [2.7, 8.7])
def test_a_network_that_is_away_from_idle_ranks_costs_time_only(idle: float, ranks: _Ranks) -> None:
    ranks.seconds("10")
    time.sleep(idle)
    ranks.translator.is_cut = True
    time.sleep(PATIENCE_SECONDS - 1.5)
    ranks.translator.is_cut = False
    assert ranks.seconds("10") < SLACK_SECONDS


@pytest.mark.long
def test_idle_connections_stay_known_to_a_translator_that_forgets(ranks: _Ranks) -> None:
    ranks.translator.forgets_after = 1.5 * PROBE_SECONDS
    ranks.seconds("10")
    opened = ranks.connections()
    time.sleep(2.5 * ranks.translator.forgets_after)
    assert ranks.seconds("10") < SLACK_SECONDS
    assert ranks.connections() == opened


# It answers what it does not know with a reset, or not at all.
@pytest.mark.long
@pytest.mark.parametrize("refuses", [True, False])
def test_a_translator_that_forgets_all_between_two_rounds_costs_time_only(refuses: bool, ranks: _Ranks) -> None:
    ranks.seconds("round")
    opened = ranks.connections()
    ranks.translator.refuses = refuses
    ranks.translator.forget()
    assert ranks.seconds("round") < PATIENCE_SECONDS + SLACK_SECONDS
    assert ranks.connections() > opened


# The one that cannot reach the other finds that the connection is gone; the other finds it when it probes.
@pytest.mark.long
def test_a_rank_that_is_told_nothing_comes_again_by_itself(ranks: _Ranks) -> None:
    ranks.seconds("10")
    # What it acknowledges late would tell it at once.
    time.sleep(1.0)
    ranks.translator.refuses = True
    ranks.translator.forget()
    assert PROBE_SECONDS / 2 < ranks.seconds("message") < PROBE_SECONDS + SLACK_SECONDS


@pytest.mark.long
def test_where_neither_can_be_reached_the_error_says_what_to_open(ranks: _Ranks) -> None:
    ranks.translator.lets_out_to = STORE_PORT
    begun = time.monotonic()
    for word in ranks.do("10"):
        assert word.startswith("error")
        assert "Nor has it come to this process. One of the two has to be reachable" in word
        assert "has to let connections in" in word
    assert time.monotonic() - begun < PATIENCE_SECONDS + 60 + SLACK_SECONDS
