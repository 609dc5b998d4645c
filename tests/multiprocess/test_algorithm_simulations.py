# SPDX-License-Identifier: Apache-2.0
"""decentralized, low_precision_decentralized and async under stock DDP, step by step against simulations.py."""

import itertools
from collections.abc import Sequence
from typing import Any

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from async_drift import let_rounds_come_in
from devices import DEVICE
from followed_training import (
    ONE_BUCKET,
    OTHER_LOOPS,
    SEVERAL_BUCKETS,
    STEPS,
    Run,
    Training,
    assert_follows,
    in_other_loops,
    take_step,
    train_rank,
)
from hooked_models import SMALL_BUCKETS, perceptron, same
from ranks import Pools, RankPool, run_ranks
from rounds_training import momentum_sgd
from test_bytegrad_definition import CODES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """A code's step is then below 1e-5, so that a difference that rounds to another code stays below, too."""
    return torch.optim.SGD(model.parameters(), lr=1e-4)


# --- decentralized ---

EVERY_THIRD = {"communication_interval": 3}
SHIFT = {"peer_selection_mode": "shift_one"}
FLAT: dict[str, Any] = {"hierarchical": False}


def _decentralized(options: dict[str, Any], **settings: Any) -> Run:
    return Run(sim.narrow_model(), "decentralized", options, momentum_sgd, **settings)


def _follow_decentralized(pool: RankPool, run: Run, tolerance: float = ONE_BUCKET) -> None:
    models = sim.copies(run.model, pool.world_size)
    algorithm = sim.Decentralized(
        sim.participants(pool.world_size, run.hosts, run.options.get("hierarchical", True)),
        run.options.get("peer_selection_mode", "all"),
        run.options.get("communication_interval", 1),
    )
    expected = sim.simulate(models, [run.make_optimizer(model) for model in models], algorithm, run.plan)
    trainings = pool.run(train_rank, run)
    assert_follows(trainings, expected, tolerance)
    assert {training.stats["rounds"] for training in trainings} == {algorithm.communications}
    backwards = len(algorithm.averaged) // len(run.plan)  # of a step, after the last of which weights are compared
    for step, averaged in enumerate(algorithm.averaged[backwards - 1 :: backwards]):
        for one, other in itertools.combinations(range(pool.world_size), 2):
            are_alike = same(trainings[one].averaged[step], trainings[other].averaged[step])
            assert are_alike == same(averaged[one], averaged[other]), f"rank {one} and rank {other} in step {step}"


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, FLAT),
        (2, {**SHIFT, **FLAT}),
        (3, {**FLAT, **EVERY_THIRD}),
        (4, SHIFT),
        (4, {**SHIFT, **FLAT, **EVERY_THIRD}),
    ],
    ids=str,
)
def test_decentralized_on_one_host(rank_pools: Pools, size: int, options: dict[str, Any]) -> None:
    _follow_decentralized(rank_pools[size], _decentralized(options))


@pytest.mark.parametrize(
    ("hosts", "options"),
    [("AAB", {}), ("AABB", EVERY_THIRD), ("AAB", SHIFT), ("ABAB", SHIFT), ("ABCC", {**SHIFT, **FLAT})],
    ids=str,
)
def test_decentralized_between_hosts(rank_pools: Pools, hosts: str, options: dict[str, Any]) -> None:
    _follow_decentralized(rank_pools[len(hosts)], _decentralized(options, hosts=hosts))


@pytest.mark.parametrize("options", [FLAT, {**SHIFT, **FLAT}], ids=str)
def test_decentralized_under_several_buckets(rank_pools: Pools, options: dict[str, Any]) -> None:
    run = _decentralized(options, ddp_options=SMALL_BUCKETS)._replace(model=perceptron())
    _follow_decentralized(rank_pools[4], run, SEVERAL_BUCKETS)


@in_other_loops
def test_decentralized_in_other_loops(rank_pools: Pools, loop: str) -> None:
    # shift_one, in which a step counted wrongly is an exchange with another peer.
    _follow_decentralized(rank_pools[4], _decentralized({**SHIFT, **FLAT}, **OTHER_LOOPS[loop]))


def _forward_twice(change: bool, on_ranks: Sequence[int]) -> tuple[list[Tensor], Tensor, int]:
    """Twice on these ranks; the weights at the start of each backward, those at the end, and the bytes sent."""
    rank = dist.get_rank()
    ddp = DDP(sim.narrow_model())
    handle = bagua.register_comm_hook(ddp, "decentralized", optimizer=momentum_sgd(ddp))
    weights, expected = list(ddp.parameters()), []
    for _ in range(3):
        with torch.no_grad():
            for weight in weights:
                weight.add_(rank + 1.0)
        if rank in on_ranks:
            sim.batch_loss(ddp, 0, rank)
            if change:
                with torch.no_grad():
                    for weight in weights:
                        weight.mul_(rank + 2.0)
        loss = sim.batch_loss(ddp, 1, rank)
        expected.append(sim.flat(weights))
        loss.backward()
    return expected, sim.flat(weights), handle.stats()["wire_bytes"]


@pytest.mark.parametrize("change", [False, True], ids=["same_weights", "changed_weights"])
def test_of_two_forwards_before_a_backward_the_last_counts(rank_pools: Pools, change: bool) -> None:
    snapshots, finals, sent = zip(*rank_pools[3].run(_forward_twice, change, range(3), timeout=20.0), strict=True)
    for final in finals:
        # A few additions and a division, each off by at most 6e-8 of its result.
        torch.testing.assert_close(final, sim.mean([snapshot[-1] for snapshot in snapshots]), rtol=1e-6, atol=1e-5)
    sent_with_one = [sent for _, _, sent in rank_pools[3].run(_forward_twice, change, [])]
    assert list(sent) == [(2 if change else 1) * amount for amount in sent_with_one], "one exchange serves both"


def test_a_forward_without_a_backward_on_one_rank_does_not_part_the_others(rank_pools: Pools) -> None:
    snapshots, finals, _ = zip(*rank_pools[3].run(_forward_twice, False, [1], timeout=20.0), strict=True)
    for final in finals:
        torch.testing.assert_close(final, sim.mean([snapshot[-1] for snapshot in snapshots]), rtol=1e-6, atol=1e-5)


# --- low_precision_decentralized ---


def _low_precision(options: dict[str, Any], **settings: Any) -> Run:
    return Run(sim.narrow_model(), "low_precision_decentralized", options, slow_sgd, **settings)


def _simulate_low_precision(run: Run, size: int, bucket_bytes: int = 10 * 2**20) -> list[list[Tensor]]:
    models = sim.copies(run.model, size)
    algorithm = sim.LowPrecisionDecentralized(
        models,
        sim.participants(size, run.hosts, run.options.get("hierarchical", True)),
        sim.own_layout(list(run.model.parameters()), bucket_bytes),
        run.options.get("communication_interval", 1),
        run.options.get("codec", "int8"),
    )
    return sim.simulate(models, [run.make_optimizer(model) for model in models], algorithm, run.plan)


def _follow_low_precision(pool: RankPool, run: Run) -> list[Training]:
    trainings = pool.run(train_rank, run)
    assert_follows(trainings, _simulate_low_precision(run, pool.world_size), ONE_BUCKET)
    return trainings


@pytest.mark.parametrize(("size", "options"), [(2, FLAT), (3, {**FLAT, **EVERY_THIRD}), (3, EVERY_THIRD)], ids=str)
def test_low_precision_decentralized_on_one_host(rank_pools: Pools, size: int, options: dict[str, Any]) -> None:
    trainings = _follow_low_precision(rank_pools[size], _low_precision(options))
    interval = options.get("communication_interval", 1)
    assert {training.stats["rounds"] for training in trainings} == {-(-STEPS // interval)}
    for step in range(0, STEPS, interval):
        alike = all(same(trainings[0].weights[step], training.weights[step]) for training in trainings[1:])
        assert alike == options.get("hierarchical", True)


@pytest.mark.parametrize("hosts", ["AAB", "ABAB", "ABCC", "ABCD"])
def test_low_precision_decentralized_between_hosts(rank_pools: Pools, hosts: str) -> None:
    size = len(hosts)
    trainings = _follow_low_precision(rank_pools[size], _low_precision({}, hosts=hosts))
    for ranks in sim.participants(size, hosts, True):
        assert all(same(trainings[rank].weights, trainings[ranks[0]].weights) for rank in ranks)


@in_other_loops
def test_low_precision_decentralized_in_other_loops(rank_pools: Pools, loop: str) -> None:
    _follow_low_precision(rank_pools[3], _low_precision(FLAT, **OTHER_LOOPS[loop]))


def _assert_replicas(
    trainings: Sequence[Training], parameters: Sequence[Tensor], layout: sim.Layout, codec: str = "int8"
) -> None:
    """Those of every step are what the neighbours hold, to the bit, and follow from those of the step before."""
    wrong = total = 0
    for step in range(STEPS):
        for rank, training in enumerate(trainings):
            neighbours = trainings[rank - 1], trainings[(rank + 1) % len(trainings)]
            left, right = (neighbour.states[step] for neighbour in neighbours)
            for bucket, indices in enumerate(layout):
                own = training.states[step][f"replica.self.{bucket}"]
                assert torch.equal(own, left[f"replica.right.{bucket}"])
                assert torch.equal(own, right[f"replica.left.{bucket}"])
                assert torch.equal(own, _in_bucket(training.weights[step], parameters, indices))
                if step > 0:
                    x, before = _in_bucket(training.stepped[step], parameters, indices), training.states[step - 1]
                    w, l, r = (before[f"replica.{side}.{bucket}"] for side in ("self", "left", "right"))  # noqa: E741
                    expected = CODES[codec](x + l / 3 + r / 3 - 5 / 3 * w) + w
                    wrong += int((own - expected).abs().gt(1e-6).sum())
                    total += own.numel()
    # The difference cancels numbers near 1, and is off by a few of their ulps, 1e-7 each: against a code's step of 1e-5
    # or more that rounds to another code in a few cases of a hundred.
    assert wrong < 0.05 * total


def _in_bucket(weights: Tensor, parameters: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    by_parameter = weights.split([p.numel() for p in parameters])
    return torch.cat([by_parameter[index] for index in indices])


def fast_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def test_replicas_follow_the_definition_and_are_the_neighbours_weights(rank_pools: Pools) -> None:
    trainings = rank_pools[3].run(train_rank, _low_precision(FLAT)._replace(make_optimizer=fast_sgd))
    parameters = list(sim.narrow_model().parameters())
    _assert_replicas(trainings, parameters, sim.own_layout(parameters))
    assert not same(trainings[0].weights[-1], trainings[1].weights[-1])


def test_low_precision_decentralized_in_several_buckets() -> None:
    # A neighbouring code of this codec is within the tolerance; one of int8 is up to a 127th of the largest difference.
    options = {**FLAT, "codec": "minmax_uint8"}
    plan = sim.one_batch_a_step(2 * STEPS)  # within which it moves
    run = _low_precision(options, ddp_options=SMALL_BUCKETS, plan=plan)
    run = run._replace(model=perceptron(), make_optimizer=fast_sgd)
    trainings = run_ranks(3, train_rank, run, env={"BAGUA_DEFAULT_BUCKET_SIZE": "2000"})
    assert_follows(trainings, _simulate_low_precision(run, 3, 2000), SEVERAL_BUCKETS)
    parameters = list(perceptron().parameters())
    layout = sim.own_layout(parameters, 2000)
    assert len(layout) == 2
    _assert_replicas(trainings, parameters, layout, "minmax_uint8")


def _alone(algorithm: str) -> tuple[list[Tensor], list[Tensor]]:
    run = Run(sim.narrow_model(), algorithm, FLAT, momentum_sgd)
    alone = sim.copies(run.model, 1)
    expected = sim.simulate(alone, [momentum_sgd(alone[0])], sim.Nothing(), run.plan)
    return train_rank(run).weights, [weights[0] for weights in expected]


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized"])
def test_one_rank_trains_as_without_a_hook(rank_pools: Pools, algorithm: str) -> None:
    ((weights, expected),) = rank_pools[1].run(_alone, algorithm)
    assert same(weights, expected)


# --- async ---


def _train_in_step(options: dict[str, Any], steps: int) -> tuple[list[Tensor], int]:
    ddp = DDP(sim.narrow_model())
    optimizer = momentum_sgd(ddp)
    handle = bagua.register_comm_hook(ddp, "async", optimizer=optimizer, sync_interval_ms=1, **options)
    history = []
    for step in range(steps):
        take_step(ddp, optimizer, [sim.Batch(step)])
        history.append(sim.flat(ddp.parameters()))
        let_rounds_come_in()  # that of this step's forward
    return history, handle.stats()["rounds"]


@pytest.mark.parametrize("warmup", [0, 4])
def test_async_ranks_that_wait_for_their_rounds_follow_the_simulation(rank_pools: Pools, warmup: int) -> None:
    steps, size = 16, 3
    histories, rounds = zip(*rank_pools[size].run(_train_in_step, {"warmup_steps": warmup}, steps), strict=True)
    # Every step of the warm-up has one exchange, and every round that started before the last step has come in. On CUDA
    # the interval begins where the end of a round is seen, so that only every second forward starts one.
    on_cuda = DEVICE == "cuda"
    assert rounds == (warmup + ((steps - warmup) // 2 if on_cuda else steps - warmup - 1),) * size
    models = sim.copies(sim.narrow_model(), size)
    optimizers = [momentum_sgd(model) for model in models]
    expected = sim.simulate(
        models, optimizers, sim.AsyncAverage(warmup, rests_after_a_round=on_cuda), sim.one_batch_a_step(steps)
    )
    for step, weights in enumerate(expected):
        for rank in range(size):
            torch.testing.assert_close(histories[rank][step], weights[rank], rtol=0, atol=ONE_BUCKET)
        assert step >= warmup or all(torch.equal(history[step], histories[0][step]) for history in histories)
