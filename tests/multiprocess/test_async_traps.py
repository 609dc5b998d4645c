# SPDX-License-Identifier: Apache-2.0
"""async where training loops are not tidy: what the original hung on, lost or left unequal."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from async_drift import LENGTH, PAUSE, SECONDS, Drift, assert_agree
from ranks import RankPool
from torch import Tensor


def _drift(counts: list[int], pause: float) -> tuple[Tensor, int, int]:
    trained = Drift()
    trained.steps(counts[dist.get_rank()], pause)
    during = trained.rounds()
    trained.handle.abort()
    return trained.copy(), during, trained.rounds()


@pytest.mark.parametrize("more", [0, 7], ids=["same_steps", "other_steps"])
def test_local_progress_is_kept_and_abort_makes_the_ranks_equal(ranks: RankPool, more: int) -> None:
    counts = [12 + more * rank for rank in range(ranks.world_size)]
    weights, during, _ = zip(*ranks.run(_drift, counts, PAUSE, timeout=SECONDS), strict=True)
    assert_agree(list(weights), counts)
    if ranks.world_size > 1:
        assert min(during) >= 3, "there were rounds while it trained"


def test_ranks_of_very_different_speed_do_not_wait_for_each_other(peers: RankPool) -> None:
    # The fast ranks' 400 steps would take the slow rank's 20 ms each if they waited.
    counts = [5] + [400] * (peers.world_size - 1)
    begin = time.monotonic()
    weights, _, _ = zip(*peers.run(_drift_unevenly, counts, timeout=SECONDS), strict=True)
    assert time.monotonic() - begin < 10.0
    assert_agree(list(weights), counts)


def _drift_unevenly(counts: list[int]) -> tuple[Tensor, int, int]:
    return _drift(counts, 0.1 if dist.get_rank() == 0 else 0.0)


def test_a_rank_may_stop_after_the_two_steps_in_which_ddp_itself_communicates(peers: RankPool) -> None:
    # DDP shares the order of its rebuilt buckets in the second forward pass; from then on it needs nobody.
    counts = [8] * peers.world_size
    counts[1] = 2
    weights, _, _ = zip(*peers.run(_drift, counts, PAUSE, timeout=SECONDS), strict=True)
    assert_agree(list(weights), counts)


# --- steps that are not steps ---


def _leave_out_backwards() -> tuple[Tensor, int]:
    trained = Drift()
    for number in range(10):
        if number % 3 == dist.get_rank() % 3:
            trained.forward()
            time.sleep(PAUSE)
        trained.step()
    trained.forward()
    trained.handle.abort()
    return trained.copy(), trained.rounds()


def test_a_forward_without_a_backward_hangs_nobody(peers: RankPool) -> None:
    weights, rounds = zip(*peers.run(_leave_out_backwards, timeout=SECONDS), strict=True)
    assert_agree(list(weights), [10] * peers.world_size)
    assert min(rounds) >= 3


def _two_forwards_two_backwards() -> Tensor:
    trained = Drift()
    for number in range(10):
        trained.optimizer.zero_grad()
        if number % 2:
            first, second = trained.forward(), trained.forward()
            (first + second).backward()
        else:
            with trained.ddp.no_sync():
                trained.forward().backward()
                time.sleep(PAUSE)
            trained.forward().backward()
        trained.optimizer.step()
        time.sleep(PAUSE)
    trained.handle.abort()
    return trained.copy()


def test_two_forwards_of_one_step(peers: RankPool) -> None:
    weights = peers.run(_two_forwards_two_backwards, timeout=SECONDS)
    assert_agree(weights, [20] * peers.world_size)  # each counts as two: its gradient is twice that of one batch


def _evaluate_between_steps() -> tuple[list[str], Tensor]:
    """Where weights changed although no training forward began there."""
    trained, wrong = Drift(), []

    def unchanged(what: str, action: Callable[[], object]) -> None:
        before = trained.copy()
        time.sleep(PAUSE)
        action()
        if not torch.equal(before, trained.copy()):
            wrong.append(what)

    def evaluate() -> None:
        trained.ddp.eval()
        trained.forward()
        with torch.no_grad():
            trained.forward()
        trained.ddp.train()
        with torch.no_grad():
            trained.forward()

    for _ in range(8):
        trained.optimizer.zero_grad()
        loss = trained.forward()
        unchanged("before backward", lambda: None)
        unchanged("in backward", loss.backward)
        unchanged("before the optimizer's step", lambda: None)
        trained.optimizer.step()
        unchanged("after the optimizer's step", lambda: None)
        for _ in range(dist.get_rank()):
            unchanged("in evaluation", evaluate)
    rounds = trained.rounds()
    trained.handle.abort()
    assert rounds >= 3
    return wrong, trained.copy()


def test_weights_change_at_the_start_of_training_forwards_only(peers: RankPool) -> None:
    wrong, weights = zip(*peers.run(_evaluate_between_steps, timeout=SECONDS), strict=True)
    assert wrong == ([],) * peers.world_size
    assert_agree(list(weights), [8] * peers.world_size)


class _PlantedError(Exception):
    pass


def _raise(gradient: Tensor) -> None:
    raise _PlantedError


def _failing_step(trained: Drift, where: str) -> None:
    loss = trained.forward()
    time.sleep(PAUSE)
    if where == "in the loss":
        raise _PlantedError
    loss.register_hook(_raise)
    loss.backward()


def _fail_in_steps(where: str) -> tuple[Tensor, int]:
    trained = Drift()
    for number in range(9):
        if number % 3 == 1 and dist.get_rank() == number // 3 % dist.get_world_size():
            with pytest.raises(_PlantedError):
                _failing_step(trained, where)
        trained.step()
    trained.handle.abort()
    return trained.copy(), trained.rounds()


@pytest.mark.parametrize("where", ["in the loss", "in backward"])
def test_an_exception_in_the_middle_of_a_step(peers: RankPool, where: str) -> None:
    weights, rounds = zip(*peers.run(_fail_in_steps, where, timeout=SECONDS), strict=True)
    assert_agree(list(weights), [9] * peers.world_size)
    assert min(rounds) >= 3


# --- abort and resume ---


def _pause_and_go_on() -> tuple[list[Tensor], list[int]]:
    trained, seen, rounds = Drift(), [], []
    for _ in range(2):
        trained.steps(6)
        trained.handle.abort()
        seen.append(trained.copy())
        trained.handle.abort()  # a second one changes nothing
        assert torch.equal(seen[-1], trained.copy())
        rounds.append(trained.rounds())
        trained.steps(4)
        assert trained.rounds() == rounds[-1], "nothing is communicated"
        seen.append(trained.copy())
        trained.handle.resume()
        trained.handle.resume()
    trained.steps(6)
    rounds.append(trained.rounds())
    trained.handle.abort()
    return [*seen, trained.copy()], rounds


def test_abort_and_resume_pause_the_rounds(peers: RankPool) -> None:
    size = peers.world_size
    results = peers.run(_pause_and_go_on, timeout=SECONDS)
    for place, count in ((0, 6), (2, 16), (4, 26)):
        assert_agree([seen[place] for seen, _ in results], [count] * size)
    for rank, (seen, rounds) in enumerate(results):
        # Alone each rank goes on by its own steps, all of them whole numbers.
        torch.testing.assert_close(seen[1], seen[0] - 4 * (rank + 1), rtol=0, atol=1e-5)
        assert rounds[0] < rounds[1] < rounds[2]


def _warm_up(abort_at: int, resume_at: int, warmup: int, steps: int) -> tuple[list[Tensor], list[int]]:
    trained, weights, rounds = Drift(warmup_steps=warmup), [], []
    for number in range(steps):
        if number == abort_at:
            trained.handle.abort()
        if number == resume_at:
            trained.handle.resume()
        trained.step()
        weights.append(trained.copy())
        rounds.append(trained.rounds())
    trained.handle.abort()
    return [*weights, trained.copy()], rounds


def _check_warm_up(results: list[tuple[list[Tensor], list[int]]], warmup: int, steps: int) -> None:
    size = len(results)
    for number in range(warmup):
        # The mean of 1, ..., n, n at most 4, has no rounding.
        expected = torch.full((LENGTH,), -(size + 1) / 2 * (number + 1))
        assert all(torch.equal(weights[number], expected) for weights, _ in results)
    assert_agree([weights[-1] for weights, _ in results], [steps] * size)


# abort, resume: before the warm-up ends or after; never is -1.
@pytest.mark.parametrize(("abort_at", "resume_at"), [(-1, -1), (2, 3), (2, 8), (0, 0), (-1, 2)])
def test_abort_and_resume_before_the_warm_up_ends(peers: RankPool, abort_at: int, resume_at: int) -> None:
    warmup, steps = 5, 14
    results = peers.run(_warm_up, abort_at, resume_at, warmup, steps, timeout=SECONDS)
    _check_warm_up(results, warmup, steps)
    begin = max(resume_at, warmup)
    for _, rounds in results:
        assert rounds[-1] - rounds[begin - 1] >= 2, "rounds begin once both the warm-up and the pause are over"
        assert len(set(rounds[warmup - 1 : begin])) == 1, "and not before"


def test_a_pause_in_the_warm_up_lasts_until_resume(peers: RankPool) -> None:
    warmup, steps = 3, 9
    results = peers.run(_warm_up, 1, -1, warmup, steps, timeout=SECONDS)
    for rank, (weights, rounds) in enumerate(results):
        assert len(set(rounds[warmup - 1 :])) == 1
        local = weights[warmup - 1] - (rank + 1) * (steps - warmup)
        assert torch.equal(weights[steps - 1], local), "after the warm-up each rank is alone"


def _interval(milliseconds: int, steps: int) -> int:
    trained = Drift(sync_interval_ms=milliseconds)
    trained.steps(steps)
    rounds = trained.rounds()
    trained.handle.abort()
    return rounds


def test_rounds_keep_their_distance(rank_pools: dict[int, RankPool]) -> None:
    two, steps = rank_pools[2], 30
    begin = time.monotonic()
    rounds = two.run(_interval, 200, steps, timeout=SECONDS)
    elapsed = time.monotonic() - begin
    assert 1 <= min(rounds) <= max(rounds) <= 1 + elapsed / 0.2
    assert max(two.run(_interval, 10**9, steps, timeout=SECONDS)) <= 1
