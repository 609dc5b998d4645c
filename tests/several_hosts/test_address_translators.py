# SPDX-License-Identifier: Apache-2.0
"""One of two ranks is behind a translator of addresses, where nobody reaches it unasked: it comes by itself."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from address_translator import Translator, behind_a_translator
from ranks import RankPool
from torch.nn.parallel import DistributedDataParallel as DDP
from two_hosts import hosts_over

# Ranks share cores with others.
SLACK_SECONDS = 8.0
# An idle connection is probed after the first, and given up after the second without an answer.
PROBE_SECONDS, PATIENCE_SECONDS = 3.0, 24.0
# More than a rank dials another in vain before it waits only for that one to come.
LATE_SECONDS = 4.0
TIMEOUT = 90.0
SYNC_EVERY = 4


def _add(numel: int, late: float = 0.0) -> None:
    """Add up; rank 1 is so many seconds late."""
    time.sleep(late * dist.get_rank())
    tensor = torch.full((numel,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(3.0).all()


def _message() -> None:
    """Send from rank 0 to rank 1, which says nothing meanwhile."""
    tensor = torch.zeros(1_000)
    if dist.get_rank() == 0:
        dist.send(tensor.fill_(7.0), 1)
    else:
        dist.recv(tensor, 0)
        assert tensor.eq(7.0).all()


class _Rounds:
    """A training that exchanges its weights after every SYNC_EVERY steps, and nothing in between."""

    kept: "_Rounds | None" = None

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._ddp = DDP(torch.nn.Linear(200, 200))
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), 0.01)
        options = {"sync_every": SYNC_EVERY, "fragments": 1, "delay": 0}
        bagua.register_comm_hook(self._ddp, "diloco", optimizer=self._optimizer, **options)

    def run(self) -> None:
        for _ in range(SYNC_EVERY):
            self._optimizer.zero_grad()
            self._ddp(torch.randn(8, 200)).square().mean().backward()
            self._optimizer.step()
        weights = [p.detach().double().sum().item() for p in self._ddp.parameters()]
        everybody = [torch.empty(len(weights), dtype=torch.float64) for _ in range(2)]
        dist.all_gather(everybody, torch.tensor(weights, dtype=torch.float64))
        assert everybody[0].equal(everybody[1])


def _round() -> None:
    _Rounds.kept = _Rounds.kept or _Rounds()
    _Rounds.kept.run()


def _seconds(function: Callable[..., None], *arguments: Any) -> float:
    begun = time.monotonic()
    function(*arguments)
    return time.monotonic() - begun


def _error() -> str:
    with pytest.raises(RuntimeError) as raised:
        _add(10)
    return str(raised.value)


class _Ranks:
    """Rank 0 outside, and rank 1 inside."""

    def __init__(self, pool: RankPool, translator: Translator) -> None:
        self.pool = pool
        self.translator = translator

    def seconds(self, function: Callable[..., None], *arguments: Any) -> float:
        """Have the ranks call it; return how long it took."""
        return max(self.pool.run(_seconds, function, *arguments))


@pytest.fixture
def ranks() -> Iterator[_Ranks]:
    with (
        hosts_over() as hosts,
        behind_a_translator(hosts) as (outside, inside, translator),
        RankPool(2, hosts=(outside, inside), group_timeout=TIMEOUT) as pool,
    ):
        yield _Ranks(pool, translator)


def test_it_is_enough_that_one_of_two_can_be_reached(ranks: _Ranks) -> None:
    ranks.seconds(_add, 10)
    ranks.seconds(_add, 1_000_000)
    ranks.seconds(_message)
    assert ranks.translator.opened >= 1


def test_a_rank_is_waited_for_whose_address_refuses_and_that_is_late(ranks: _Ranks) -> None:
    ranks.translator.refuses = True
    # Both are there, and have exchanged nothing.
    ranks.seconds(_add, 0)
    assert LATE_SECONDS - 1 < ranks.seconds(_add, 10, LATE_SECONDS) < LATE_SECONDS + SLACK_SECONDS


# The kernel's limit for an idle connection counts from its last sign of life, not from the cut.
@pytest.mark.long
@pytest.mark.parametrize("idle", [2.7, 8.7])
def test_a_network_that_is_away_from_idle_ranks_costs_time_only(idle: float, ranks: _Ranks) -> None:
    ranks.seconds(_add, 10)
    time.sleep(idle)
    ranks.translator.is_cut = True
    time.sleep(PATIENCE_SECONDS - 1.5)
    ranks.translator.is_cut = False
    assert ranks.seconds(_add, 10) < SLACK_SECONDS


@pytest.mark.long
def test_idle_connections_stay_known_to_a_translator_that_forgets(ranks: _Ranks) -> None:
    ranks.translator.forgets_after = 1.5 * PROBE_SECONDS
    ranks.seconds(_add, 10)
    opened = ranks.translator.opened
    time.sleep(2.5 * ranks.translator.forgets_after)
    assert ranks.seconds(_add, 10) < SLACK_SECONDS
    assert ranks.translator.opened == opened


# It answers what it does not know with a reset, or not at all.
@pytest.mark.long
@pytest.mark.parametrize("refuses", [True, False])
def test_a_translator_that_forgets_all_between_two_rounds_costs_time_only(refuses: bool, ranks: _Ranks) -> None:
    ranks.seconds(_round)
    opened = ranks.translator.opened
    ranks.translator.refuses = refuses
    ranks.translator.forget()
    assert ranks.seconds(_round) < PATIENCE_SECONDS + SLACK_SECONDS
    assert ranks.translator.opened > opened


# The one that cannot reach the other finds that the connection is gone; the other finds it when it probes.
@pytest.mark.long
def test_a_rank_that_is_told_nothing_comes_again_by_itself(ranks: _Ranks) -> None:
    ranks.seconds(_add, 10)
    # What it acknowledges late would tell it at once.
    time.sleep(1.0)
    ranks.translator.refuses = True
    ranks.translator.forget()
    assert PROBE_SECONDS / 2 < ranks.seconds(_message) < PROBE_SECONDS + SLACK_SECONDS


@pytest.mark.long
def test_where_neither_can_be_reached_the_error_says_what_to_open(ranks: _Ranks) -> None:
    ranks.translator.lets_out = False
    begun = time.monotonic()
    for error in ranks.pool.run(_error):
        assert "Nor has it come to this process. One of the two has to be reachable" in error
        assert "has to let connections in" in error
    assert time.monotonic() - begun < PATIENCE_SECONDS + 60 + SLACK_SECONDS
