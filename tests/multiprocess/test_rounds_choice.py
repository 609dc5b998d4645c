# SPDX-License-Identifier: Apache-2.0
"""diloco without a schedule: what it chooses in the first steps, shows, keeps and does with it."""

import time
from functools import partial
from typing import Any

import pytest
import simulations as sim
import torch
import torch.distributed as dist
from hooked_models import captured_stderr, same
from ranks import Pools, on_ranks
from rounds_training import Training, begun, begun_anew, register
from torch import Tensor

# Eight steps are timed, and eight more beside an exchange; the ranks compare what they have found before the next.
TIMED_STEPS = 8
FIRST_STEPS = 2 * TIMED_STEPS + 1


def _begun(**options: Any) -> Training:
    return begun(partial(register, **options))


def _train(training: Training, steps: int, seconds: float = 0.0) -> None:
    """Steps that take so long, and more."""
    for number in range(steps):
        time.sleep(seconds)
        training.step(number)


def _by_itself(options: dict[str, Any]) -> tuple[dict[str, int], int, Tensor]:
    training = _begun(**options)
    # Ranks whose steps take different times choose the same.
    _train(training, TIMED_STEPS - 1, 0.01 * dist.get_rank())
    before = training.handle.stats()["logical_bytes"]
    _train(training, FIRST_STEPS - TIMED_STEPS, 0.01 * dist.get_rank())
    assert training.handle.stats()["chosen"] == {}
    # The first layer is the longest fragment of all that there are; then the two numbers that are compared.
    longest = sum(p.numel() for p in training.ddp.module[0].parameters())
    assert training.handle.stats()["logical_bytes"] - before == 4 * longest + 2 * 8
    _train(training, 1)
    assert training.handle.stats()["rounds"] == 0
    chosen = training.handle.stats()["chosen"]
    _train(training, chosen["sync_every"])
    rounds = training.handle.stats()["rounds"]
    training.handle.synchronize()
    training.handle.reset()
    assert training.handle.stats()["chosen"] == chosen
    return chosen, rounds, training.weights()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"fragments": 3}),
        ({"codec": "int8", "hierarchical": False}, {"fragments": 3}),
        ({"sync_every": 40}, {"sync_every": 40, "fragments": 2}),
        ({"fragments": 2, "delay": 3}, {"sync_every": 30, "fragments": 2, "delay": 3}),
    ],
    ids=str,
)
def test_ranks_choose_the_same_schedule_and_follow_it(
    rank_pools: Pools, options: dict[str, Any], expected: dict[str, int]
) -> None:
    results = rank_pools[3].run(_by_itself, options)
    for chosen, rounds, weights in results:
        assert chosen == results[0][0]
        assert chosen | expected == chosen
        assert chosen["sync_every"] >= 30
        assert chosen["delay"] < chosen["sync_every"] / chosen["fragments"]
        # Each fragment once in a round.
        assert rounds == chosen["fragments"]
        assert same(weights, results[0][2])


@on_ranks(2)
def test_a_checkpoint_holds_what_was_chosen() -> None:
    whole = _begun(mixing=0.5)
    _train(whole, FIRST_STEPS + 3)
    broken = begun_anew(whole, partial(_begun, mixing=0.5))
    chosen = dict(whole.handle.stats()["chosen"])
    assert broken.handle.stats()["chosen"] == chosen
    assert chosen["sync_every"] >= 30
    for training in (whole, broken):
        _train(training, 30)
    assert same(whole.weights(), broken.weights())


def _goes_on_before_the_choice() -> dict[str, int]:
    training = _begun()
    _train(training, FIRST_STEPS - 4)  # the exchange may be on its way
    training.handle.load_state_dict(training.handle.state_dict())
    _train(training, FIRST_STEPS - 1)
    assert training.handle.stats()["chosen"] == {}
    _train(training, 1)
    return dict(training.handle.stats()["chosen"])


def test_a_run_that_goes_on_from_before_the_choice_measures_anew(rank_pools: Pools) -> None:
    chosen = rank_pools[2].run(_goes_on_before_the_choice)
    assert chosen[0] == chosen[1] != {}


def _skips_the_last_measured_step() -> dict[str, int]:
    training = _begun()
    _train(training, FIRST_STEPS - 2)
    if dist.get_rank() == 0:
        training.optimizer.zero_grad()
        sim.batch_loss(training.ddp, 0, 0).backward()
    else:
        _train(training, 1)
    dist.all_reduce(torch.ones(1))
    _train(training, 1)
    return dict(training.handle.stats()["chosen"])


def test_no_rank_waits_in_its_optimizer_for_one_that_skips_the_step(rank_pools: Pools) -> None:
    chosen = rank_pools[2].run(_skips_the_last_measured_step, timeout=30.0)
    assert chosen[0] == chosen[1] != {}


def _choose_and_say() -> str:
    with captured_stderr() as said:
        _train(_begun(), FIRST_STEPS)
        return said()


def test_one_rank_says_what_was_chosen(rank_pools: Pools) -> None:
    first, other = rank_pools[2].run(_choose_and_say)
    assert first.count("bagua: diloco goes on with sync_every=") == 1
    assert "bagua: diloco goes on" not in other
