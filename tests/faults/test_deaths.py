# SPDX-License-Identifier: Apache-2.0
"""The death of a rank ends the operations of all others within two seconds."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import run_ranks
from slowness import slowness
from trouble import (
    DEATH_SECONDS,
    OPERATIONS,
    SLACK_SECONDS,
    TRANSPORTS,
    VICTIM,
    Outcome,
    announce_trouble,
    assert_names,
    calls,
    cause_of,
    die,
    expect_error,
    selection,
    store,
    time_of_trouble,
    warm_up,
)

SIZE = 3
TIMEOUT = 3.0


def _seconds_since_the_death(outcome: Outcome) -> float:
    """Seconds of a machine that does nothing else."""
    return (outcome.when - time_of_trouble()) / slowness()


def _assert_noticed_in_time(seconds_of_a_death: Callable[[], list[float]], tries: int) -> None:
    """Assert it of the death that is noticed first: a busy machine delays one or the other."""
    seconds: list[float] = []
    while len(seconds) < tries and not (seconds and min(seconds) < DEATH_SECONDS):
        seconds.append(max(seconds_of_a_death()))
    assert min(seconds) < DEATH_SECONDS, seconds
    assert max(seconds) < DEATH_SECONDS + SLACK_SECONDS, seconds


def _die_in(operation: str) -> tuple[Outcome, float] | None:
    warm_up()
    if dist.get_rank() == VICTIM:
        announce_trouble()
        die()
    outcome = expect_error(calls()[operation])
    return outcome, _seconds_since_the_death(outcome)


@pytest.mark.parametrize(
    ("operation", "transport"),
    selection(
        # Another rank may still send to whoever receives from any: see the timeouts below.
        itertools.product(sorted(OPERATIONS.keys() - {"recv from any"}), TRANSPORTS),
        [
            ("all_reduce", "in-host"),
            ("all_reduce", "between-hosts"),
            ("barrier", "in-host"),
            ("all_to_all", "between-hosts"),
            ("send", "in-host"),
        ],
    ),
)
def test_a_death_is_noticed_within_two_seconds_by_all(operation: str, transport: str) -> None:
    def seconds() -> list[float]:
        results = run_ranks(SIZE, _die_in, operation, env=TRANSPORTS[transport], group_timeout=60.0, dying={VICTIM})
        survivors = [result for result in results if result is not None]
        assert len(survivors) == SIZE - 1
        for outcome, _ in survivors:
            assert_names(operation, outcome.message)
            assert f"rank {VICTIM}" in outcome.message
        cause_of([outcome for outcome, _ in survivors])
        return [found for _, found in survivors]

    _assert_noticed_in_time(seconds, tries=5)


SLOW, DEAD = 0, 3
# Who shares a host: a death shows in shared memory, in a connection, or to one rank in this and to another in that.
PLACES: dict[str, Mapping[str, str | Sequence[str]]] = {
    "one host": {"BAGUA_HOST_ID": list("aaaa")},
    "one host without memory": {"BAGUA_HOST_ID": list("aaaa"), "BAGUA_SHARED_MEMORY": "0"},
    "four hosts": {"BAGUA_HOST_ID": list("abcd")},
    "two hosts": {"BAGUA_HOST_ID": list("aabb")},
}


def _die_beside_a_slow_rank() -> tuple[Outcome, float] | None:
    warm_up()
    if dist.get_rank() == SLOW:
        store().wait(["survivors are done"], timedelta(seconds=40))
        return None
    if dist.get_rank() == DEAD:
        # In the operation, of which all others have what they need from this rank.
        threading.Timer(0.5, lambda: (announce_trouble(), die())).start()
    outcome = expect_error(calls()["all_reduce"])
    seconds = _seconds_since_the_death(outcome)
    if store().add("done", 1) == 2:
        store().set("survivors are done", "yes")
    return outcome, seconds


@pytest.mark.parametrize("places", PLACES)
def test_a_death_is_noticed_though_all_wait_for_a_rank_that_is_slow(places: str) -> None:
    def seconds() -> list[float]:
        results = run_ranks(4, _die_beside_a_slow_rank, env=PLACES[places], group_timeout=30.0, dying={DEAD})
        survivors = [result for result in results if result is not None]
        assert len(survivors) == 2
        assert f"rank {DEAD} " in cause_of([outcome for outcome, _ in survivors]).partition("failed: ")[2]
        return [found for _, found in survivors]

    _assert_noticed_in_time(seconds, tries=3)


def _receive_from_any_beside_a_death() -> tuple[Outcome, float] | None:
    warm_up()
    if dist.get_rank() == VICTIM:
        die()
    begun = time.monotonic()
    return expect_error(calls()["recv from any"]), begun


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receive_from_any_rank_ends_at_its_timeout_and_names_the_dead(transport: str) -> None:
    results = run_ranks(
        SIZE, _receive_from_any_beside_a_death, env=TRANSPORTS[transport], group_timeout=TIMEOUT, dying={VICTIM}
    )
    survivors = [result for result in results if result is not None]
    assert len(survivors) == SIZE - 1
    # Whoever comes late shares the end of the first.
    begun = min(begun for _, begun in survivors)
    for outcome, _ in survivors:
        assert TIMEOUT - 0.5 < outcome.when - begun < TIMEOUT + SLACK_SECONDS
        assert_names("recv from any", outcome.message)
        assert f"rank {VICTIM}" in outcome.message
