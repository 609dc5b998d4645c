# SPDX-License-Identifier: Apache-2.0
"""local_sgd and diloco: checkpoints anywhere in a round, ends, and ranks that do not keep step."""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hooked_models import same, same_everywhere
from ranks import Pools, on_ranks, run_ranks
from rounds_training import Plan, adam, averaged_every, begun, begun_anew, register
from torch import Tensor

pytestmark = pytest.mark.any_device


def _train_on(plan: Plan, options: dict[str, Any], breaks: Sequence[int]) -> list[Tensor]:
    """The weights after every step, of a run that is saved and begun anew after the steps of `breaks`."""
    history: list[Tensor] = []
    begin = partial(begun, partial(plan.register, **options), adam)
    training = begin()
    for step in range(1, 20):
        training.step(step)
        history.append(training.weights())
        if step in breaks:
            training = begun_anew(training, begin)
    return history


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(4), {}),
        (Plan(8, 2, delay=3, mixing=0.25), {}),
        (Plan(8, 2, delay=2), {"codec": "minmax_uint8"}),
    ],
    ids=str,
)
def test_a_checkpoint_anywhere_in_a_round_continues_to_the_bit(
    rank_pools: Pools, plan: Plan, options: dict[str, Any]
) -> None:
    whole = rank_pools[2].run(_train_on, plan, options, [])
    broken = rank_pools[2].run(_train_on, plan, options, [1, 6, 7, 12])
    assert same(whole, broken)


ENDS: list[tuple[str, dict[str, Any], str, int]] = [
    (algorithm, options, call, steps)
    for (algorithm, options), call, steps in itertools.product(
        [
            ("diloco", {"sync_every": 6, "fragments": 2, "delay": 2, "mixing": 0.5}),
            ("diloco", {"sync_every": 5, "fragments": 1, "delay": 0}),
            ("local_sgd", {"sync_every": 5}),
        ],
        ["synchronize", "abort", "remove"],
        # Of the first options: nothing done, on its way, just synchronised, on its way again.
        [0, 1, 2, 3, 5, 6],
    )
]
_SHORT_ENDS = [ENDS[1], ENDS[9], ENDS[16], ENDS[22], ENDS[29], ENDS[38], ENDS[46], ENDS[52]]


@pytest.mark.parametrize(
    ("algorithm", "options", "call", "steps"),
    [end if end in _SHORT_ENDS else pytest.param(*end, marks=pytest.mark.long) for end in ENDS],
    ids=str,
)
@on_ranks(3)
def test_ranks_end_with_the_same_weights_wherever_they_stop(
    algorithm: str, options: dict[str, Any], call: str, steps: int
) -> None:
    training = begun(partial(register, algorithm=algorithm, **options))
    for number in range(steps):
        training.step(number)
    getattr(training.handle, call)()
    weights = training.weights()
    assert same_everywhere(weights)
    if call != "remove":
        getattr(training.handle, call)()
        assert same(weights, training.weights()), "a second call has nothing left to do"


# --- ranks that do not keep step ---


def _with_uneven_steps(end: str, ahead: int) -> str:
    training = begun(averaged_every(3))
    try:
        for number in range(5 + (ahead if dist.get_rank() == 1 else 0)):
            training.step(number)
        getattr(training.handle, end)()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("algorithm", ["diloco", "local_sgd"])
@on_ranks(3)
def test_rounds_go_on_in_another_block_and_from_a_state_that_was_saved_after_one(algorithm: str) -> None:
    begin = partial(begun, partial(register, algorithm=algorithm, sync_every=2))
    training = begin()
    for number in range(12):
        with training.handle:
            training.step(number)
        # What each has learnt by itself is in the round that the block ends.
        assert same_everywhere(training.weights())
        if number % 4 == 3:
            training = begun_anew(training, begin)


@pytest.mark.parametrize("end", [pytest.param("synchronize", marks=pytest.mark.long), "abort", "remove"])
def test_ranks_that_end_after_other_steps_are_told_both(rank_pools: Pools, end: str) -> None:
    # Rank 1 is one step short of a round when both end.
    for message in rank_pools[2].run(_with_uneven_steps, end, -1, timeout=30.0):
        assert message.startswith("ValueError"), message
        assert "rank 1" in message
        assert "after step 4 against" in message
        assert "after step 5" in message


@pytest.mark.parametrize(
    "end", ["synchronize", *(pytest.param(e, marks=pytest.mark.long) for e in ("remove", "abort"))]
)
def test_a_rank_in_a_round_that_the_others_have_not_reached_is_told(end: str) -> None:
    # Rank 1 is in the round of step 6 when rank 0 ends after step 5.
    for message in run_ranks(2, _with_uneven_steps, end, 1, timeout=30.0):
        assert "the ranks do not make the same call" in message, message
        assert "bagua:average_fragment" in message
        assert "rank 0" in message
        assert "rank 1" in message


def _stay_away() -> str:
    if dist.get_rank() == 0:
        return _with_uneven_steps("synchronize", 0)
    training = begun(averaged_every(3))
    for number in range(2):
        training.step(number)
    time.sleep(6)
    return ""


def test_a_rank_that_stays_away_is_named_at_the_timeout() -> None:
    message = run_ranks(2, _stay_away, group_timeout=3.0, timeout=40.0)[0]
    assert "Not there: rank 1 (has nothing under way" in message, message
    assert "bagua:average_fragment" in message
