# SPDX-License-Identifier: Apache-2.0
"""async where training loops are not tidy: what the original hung on, lost or left unequal."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from async_drift import LENGTH, ROUNDS, SECONDS, Drift, assert_agree
from ranks import Pools, RankPool
from slowness import Moment, busy_seconds, seconds_asleep
from torch import Tensor


def _drift(counts: list[int]) -> tuple[Tensor, int]:
    trained = Drift()
    trained.steps_with_rounds(counts[dist.get_rank()])
    trained.handle.abort()
    return trained.copy(), trained.taken


@pytest.mark.parametrize("more", [0, 7], ids=["same_steps", "other_steps"])
def test_local_progress_is_kept_and_abort_makes_the_ranks_equal(ranks: RankPool, more: int) -> None:
    counts = [12 + more * rank for rank in range(ranks.world_size)]
    weights, taken = zip(*ranks.run(_drift, counts, timeout=SECONDS), strict=True)
    assert_agree(list(weights), list(taken))


def test_ranks_of_very_different_speed_do_not_wait_for_each_other(peers: RankPool) -> None:
    # The fast ranks' 400 steps would take the slow rank's 100 ms each if they waited.
    counts = [5] + [400] * (peers.world_size - 1)
    weights, asleep = zip(*peers.run(_drift_unevenly, counts, timeout=SECONDS), strict=True)
    assert max(asleep[1:]) < 5.0
    assert_agree(list(weights), counts)


def _drift_unevenly(counts: list[int]) -> tuple[Tensor, float]:
    """The weights, and what the steps have waited, for others or in pauses."""
    trained, rank = Drift(), dist.get_rank()
    begin = Moment(time.monotonic(), busy_seconds())
    trained.steps(counts[rank], pause=0.1 if rank == 0 else 0.0)
    asleep = seconds_asleep(begin, Moment(time.monotonic(), busy_seconds()))
    trained.handle.abort()
    return trained.copy(), asleep


def test_a_rank_may_stop_after_the_two_steps_in_which_ddp_itself_communicates(peers: RankPool) -> None:
    # DDP shares the order of its rebuilt buckets in the second forward pass; from then on it needs nobody.
    weights, taken = zip(*peers.run(_stop_early, timeout=SECONDS), strict=True)
    assert taken[1] == 2
    assert_agree(list(weights), list(taken))


def _stop_early() -> tuple[Tensor, int]:
    trained = Drift()
    if dist.get_rank() == 1:
        trained.steps(2)
    else:
        # The other one takes part in these from within its abort().
        trained.steps_with_rounds(8)
    trained.handle.abort()
    return trained.copy(), trained.taken


# --- steps that are not steps ---


def _leave_out_backwards() -> tuple[Tensor, int]:
    trained = Drift()
    for number in trained.numbers(10):
        if number % 3 == dist.get_rank() % 3:
            trained.forward()
            trained.await_round()
        trained.step()
    trained.forward()
    trained.handle.abort()
    return trained.copy(), trained.taken


def test_a_forward_without_a_backward_hangs_nobody(peers: RankPool) -> None:
    weights, taken = zip(*peers.run(_leave_out_backwards, timeout=SECONDS), strict=True)
    assert_agree(list(weights), list(taken))


def _two_forwards_two_backwards() -> tuple[Tensor, int]:
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
    trained.handle.abort()
    return trained.copy(), backwards


def test_two_forwards_of_one_step(peers: RankPool) -> None:
    weights, backwards = zip(*peers.run(_two_forwards_two_backwards, timeout=SECONDS), strict=True)
    assert_agree(list(weights), list(backwards))


def _evaluate_between_steps() -> tuple[list[str], Tensor, int]:
    """Where weights changed although no training forward began there."""
    trained, wrong = Drift(), []

    def unchanged(what: str, action: Callable[[], object]) -> None:
        before = trained.copy()
        action()
        if not torch.equal(before, trained.copy()):
            wrong.append(what)

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
    trained.handle.abort()
    return wrong, trained.copy(), trained.taken


def test_weights_change_at_the_start_of_training_forwards_only(peers: RankPool) -> None:
    wrong, weights, taken = zip(*peers.run(_evaluate_between_steps, timeout=SECONDS), strict=True)
    assert wrong == ([],) * peers.world_size
    assert_agree(list(weights), list(taken))


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


def _fail_in_steps(where: str) -> tuple[Tensor, int]:
    trained = Drift()
    for number in trained.numbers(9):
        if number < 9 and number % 3 == 1 and dist.get_rank() == number // 3 % dist.get_world_size():
            with pytest.raises(_PlantedError):
                _failing_step(trained, where)
        trained.step()
    trained.handle.abort()
    return trained.copy(), trained.taken


@pytest.mark.parametrize("where", ["in the loss", "in backward"])
def test_an_exception_in_the_middle_of_a_step(peers: RankPool, where: str) -> None:
    weights, taken = zip(*peers.run(_fail_in_steps, where, timeout=SECONDS), strict=True)
    assert_agree(list(weights), list(taken))


# --- abort and resume ---


def _pause_and_go_on() -> tuple[list[Tensor], list[int]]:
    """The weights at every abort() and resume(), and how many steps this rank had taken."""
    trained, seen, taken = Drift(), [], []
    for _ in range(2):
        trained.steps_with_rounds(6)
        trained.handle.abort()
        seen.append(trained.copy())
        taken.append(trained.taken)
        trained.handle.abort()  # a second one changes nothing
        assert torch.equal(seen[-1], trained.copy())
        rounds = trained.rounds()
        trained.steps(4)
        assert trained.rounds() == rounds, "nothing is communicated"
        seen.append(trained.copy())
        taken.append(trained.taken)
        trained.handle.resume()
        trained.handle.resume()
    # There are rounds again.
    trained.steps_with_rounds(6)
    trained.handle.abort()
    return [*seen, trained.copy()], [*taken, trained.taken]


def test_abort_and_resume_pause_the_rounds(peers: RankPool) -> None:
    results = peers.run(_pause_and_go_on, timeout=SECONDS)
    for place in (0, 2, 4):
        assert_agree([seen[place] for seen, _ in results], [taken[place] for _, taken in results])
    for rank, (seen, _) in enumerate(results):
        # Alone each rank goes on by its own steps, all of them whole numbers.
        torch.testing.assert_close(seen[1], seen[0] - 4 * (rank + 1), rtol=0, atol=1e-5)


def _warm_up(abort_at: int, resume_at: int, warmup: int, steps: int) -> tuple[list[Tensor], list[int], int]:
    trained, weights, rounds = Drift(warmup_steps=warmup), [], []
    for number in range(steps):
        if number == abort_at:
            trained.handle.abort()
        if number == resume_at:
            trained.handle.resume()
        trained.step()
        weights.append(trained.copy())
        rounds.append(trained.rounds())
    if abort_at <= resume_at:
        # Rounds begin once both the warm-up and the pause are over.
        trained.steps_with_rounds(0, ROUNDS - (rounds[-1] - rounds[max(resume_at, warmup) - 1]))
    trained.handle.abort()
    return [*weights, trained.copy()], rounds, trained.taken


def _check_warm_up(results: list[tuple[list[Tensor], list[int], int]], warmup: int) -> None:
    size = len(results)
    for number in range(warmup):
        # The mean of 1, ..., n, n at most 4, has no rounding.
        expected = torch.full((LENGTH,), -(size + 1) / 2 * (number + 1))
        assert all(torch.equal(weights[number], expected) for weights, _, _ in results)
    assert_agree([weights[-1] for weights, _, _ in results], [taken for _, _, taken in results])


# abort, resume: before the warm-up ends or after; never is -1.
@pytest.mark.parametrize(("abort_at", "resume_at"), [(-1, -1), (2, 3), (2, 8), (0, 0), (-1, 2)])
def test_abort_and_resume_before_the_warm_up_ends(peers: RankPool, abort_at: int, resume_at: int) -> None:
    warmup, steps = 5, 14
    results = peers.run(_warm_up, abort_at, resume_at, warmup, steps, timeout=SECONDS)
    _check_warm_up(results, warmup)
    for _, rounds, _ in results:
        assert len(set(rounds[warmup - 1 : max(resume_at, warmup)])) == 1, "no rounds before"


def test_a_pause_in_the_warm_up_lasts_until_resume(peers: RankPool) -> None:
    warmup, steps = 3, 9
    results = peers.run(_warm_up, 1, -1, warmup, steps, timeout=SECONDS)
    for rank, (weights, rounds, _) in enumerate(results):
        assert len(set(rounds[warmup - 1 :])) == 1
        local = weights[warmup - 1] - (rank + 1) * (steps - warmup)
        assert torch.equal(weights[steps - 1], local), "after the warm-up each rank is alone"


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
