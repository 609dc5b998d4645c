# SPDX-License-Identifier: Apache-2.0
"""async where training loops are not tidy: what the original hung on, lost or left unequal."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from async_drift import LENGTH, ROUNDS, SECONDS, Drift
from ranks import Pools, on_ranks
from slowness import Moment, busy_seconds, seconds_asleep
from torch import Tensor


@on_ranks("ranks", timeout=SECONDS)
def test_local_progress_is_kept_and_abort_makes_the_ranks_equal() -> None:
    trained = Drift()
    trained.steps_with_rounds(12 + 7 * dist.get_rank())
    trained.end()


@on_ranks(3, timeout=SECONDS)
def test_ranks_of_very_different_speed_do_not_wait_for_each_other() -> None:
    trained, is_slow = Drift(), dist.get_rank() == 0
    begin = Moment(time.monotonic(), busy_seconds())
    # The fast ranks' 400 steps would take the slow rank's 100 ms each if they waited.
    trained.steps(5 if is_slow else 400, pause=0.1 if is_slow else 0.0)
    asleep = seconds_asleep(begin, Moment(time.monotonic(), busy_seconds()))
    assert is_slow or asleep < 5.0
    trained.end()


@on_ranks(3, timeout=SECONDS)
def test_a_rank_may_stop_after_the_two_steps_in_which_ddp_itself_communicates() -> None:
    trained = Drift()
    if dist.get_rank() == 1:
        # DDP shares the order of its rebuilt buckets in the second forward pass; from then on it needs nobody.
        trained.steps(2)
    else:
        # The other one takes part in these from within its abort().
        trained.steps_with_rounds(8)
    trained.end()


# --- steps that are not steps ---


@on_ranks(3, timeout=SECONDS)
def test_a_forward_without_a_backward_hangs_nobody() -> None:
    trained = Drift()
    for number in trained.numbers(10):
        if number % 3 == dist.get_rank() % 3:
            trained.forward()
            trained.await_round()
        trained.step()
    trained.forward()
    trained.end()


@on_ranks(3, timeout=SECONDS)
def test_two_forwards_of_one_step() -> None:
    trained, backwards = Drift(), 0
    for number in trained.numbers(10):
        trained.optimizer.zero_grad()
        if number % 2:
            first, second = trained.forward(), trained.forward()
            (first + second).backward()
        else:
            with trained.ddp.no_sync():
                trained.forward().backward()
            trained.forward().backward()
        trained.optimizer.step()
        backwards += 2  # the gradient is twice that of one batch
        trained.await_round()
    trained.end(backwards)


@on_ranks(3, timeout=SECONDS)
def test_weights_change_at_the_start_of_training_forwards_only() -> None:
    trained = Drift()

    def unchanged(what: str, action: Callable[[], object]) -> None:
        before = trained.copy()
        action()
        assert torch.equal(before, trained.copy()), what

    def evaluate() -> None:
        trained.ddp.eval()
        trained.ddp([trained.gradient])
        with torch.no_grad():
            trained.ddp([trained.gradient])
        trained.ddp.train()
        with torch.no_grad():
            trained.ddp([trained.gradient])

    for number in trained.numbers(8):
        trained.optimizer.zero_grad()
        loss = trained.forward()
        # In one place or another the average comes in, and waits to be added.
        if number % 3 == 0:
            unchanged("before backward", trained.await_round)
        unchanged("in backward", loss.backward)
        if number % 3 == 1:
            unchanged("before the optimizer's step", trained.await_round)
        trained.optimizer.step()
        trained.taken += 1
        unchanged("after the optimizer's step", trained.await_round)
        for _ in range(dist.get_rank()):
            unchanged("in evaluation", evaluate)
    trained.end()


class _PlantedError(Exception):
    pass


def _raise(gradient: Tensor) -> None:
    raise _PlantedError


def _failing_step(trained: Drift, where: str) -> None:
    loss = trained.forward()
    trained.await_round()
    if where == "in the loss":
        raise _PlantedError
    loss.register_hook(_raise)
    loss.backward()


@pytest.mark.parametrize("where", ["in the loss", "in backward"])
@on_ranks(3, timeout=SECONDS)
def test_an_exception_in_the_middle_of_a_step(where: str) -> None:
    trained = Drift()
    for number in trained.numbers(9):
        if number < 9 and number % 3 == 1 and dist.get_rank() == number // 3 % dist.get_world_size():
            with pytest.raises(_PlantedError):
                _failing_step(trained, where)
        trained.step()
    trained.end()


# --- abort and resume ---


@on_ranks(3, timeout=SECONDS)
def test_abort_and_resume_pause_the_rounds() -> None:
    trained = Drift()
    for turn in range(2):
        trained.steps_with_rounds(6)
        trained.end()
        before = trained.copy()
        trained.handle.abort()  # a second one changes nothing
        assert torch.equal(before, trained.copy())
        rounds = trained.rounds()
        trained.steps(4)
        assert trained.rounds() == rounds, "nothing is communicated"
        if turn == 0:
            # Alone each rank goes on by its own steps, all of them whole numbers.
            torch.testing.assert_close(trained.copy(), before - 4 * (dist.get_rank() + 1), rtol=0, atol=1e-5)
        trained.handle.resume()
        trained.handle.resume()
    # There are rounds again.
    trained.steps_with_rounds(6)
    trained.end()


@on_ranks(3, timeout=SECONDS)
def test_rounds_go_on_in_another_block_and_from_a_state_that_was_saved_after_one() -> None:
    trained = Drift()
    for _ in range(2):
        with trained.handle:
            trained.steps_with_rounds(6)
    saved = trained.handle.state_dict()
    trained = Drift()
    trained.handle.load_state_dict(saved)
    trained.steps_with_rounds(6)
    trained.handle.abort()


# abort, resume: before the warm-up ends or after; never is -1.
@pytest.mark.parametrize(("abort_at", "resume_at"), [(2, 3), (2, 8), (0, 0), (-1, 2)])
@on_ranks(3, timeout=SECONDS)
def test_abort_and_resume_before_the_warm_up_ends(abort_at: int, resume_at: int) -> None:
    warmup = 5
    trained, rounds = Drift(warmup_steps=warmup), []
    for number in range(14):
        if number == abort_at:
            trained.handle.abort()
        if number == resume_at:
            trained.handle.resume()
        trained.step()
        rounds.append(trained.rounds())
        if number < max(warmup, resume_at):
            # The mean of 1, ..., n, n at most 4, has no rounding. After the warm-up a rank that pauses is alone.
            alone = max(0, number + 1 - warmup)
            expected = -(dist.get_world_size() + 1) / 2 * (number + 1 - alone) - (dist.get_rank() + 1) * alone
            assert torch.equal(trained.copy(), torch.full((LENGTH,), expected))
    # Rounds begin once both the warm-up and the pause are over.
    before = rounds[max(resume_at, warmup) - 1]
    assert rounds[warmup - 1] == before
    trained.steps_with_rounds(0, ROUNDS - (rounds[-1] - before))
    trained.end()


def _interval(milliseconds: int, rounds: int, further_steps: int) -> int:
    trained = Drift(sync_interval_ms=milliseconds)
    trained.steps_with_rounds(0, rounds)
    trained.steps(further_steps)
    rounds = trained.rounds()
    trained.handle.abort()
    return rounds


def test_rounds_keep_their_distance(rank_pools: Pools) -> None:
    begin = time.monotonic()
    rounds = rank_pools[2].run(_interval, 200, ROUNDS, 0, timeout=SECONDS)
    assert max(rounds) <= 1 + (time.monotonic() - begin) / 0.2
    assert rank_pools[2].run(_interval, 10**9, 1, 30, timeout=SECONDS) == [1, 1]
