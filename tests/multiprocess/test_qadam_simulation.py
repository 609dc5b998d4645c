# SPDX-License-Identifier: Apache-2.0
"""qadam under stock DDP: step by step against simulations.py, and against torch's Adam while it warms up."""

import copy
from typing import Any

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
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
from hooked_models import SMALL_BUCKETS, new_group, perceptron, same
from ranks import Pools, RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

WARMUP = 5
# The simulation runs on the CPU. A GPU sums in another order, so that now and then a moment gets the neighbouring code.
TOLERANCE = SEVERAL_BUCKETS if DEVICE == "cuda" else ONE_BUCKET
FLAT: dict[str, Any] = {"hierarchical": False}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """What differs between them must not be mixed up in the buckets that they share."""
    parameters = list(model.parameters())
    return [
        {"params": parameters[::2], "lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01},
        {"params": parameters[1::2], "lr": 3e-3, "betas": (0.8, 0.999), "eps": 1e-7},
    ]


def qadam(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = bagua.QAdamOptimizer(two_groups(model), warmup_steps=WARMUP)
    return optimizer


def _simulate(run: Run, size: int, layout: sim.Layout) -> list[list[Tensor]]:
    models = sim.copies(run.model, size)
    optimizers = [sim.ReferenceQAdam(two_groups(model), WARMUP) for model in models]
    places = sim.participants(size, run.hosts, run.options.get("hierarchical", True))
    algorithm = sim.QAdam(optimizers, places, layout, run.options.get("codec", "int8"))
    return sim.simulate(models, optimizers, algorithm, run.plan)


def _note_bucket(noted: list[list[Tensor]], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    noted.append(bucket.parameters())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _ddp_layout(model: nn.Module, ddp_options: dict[str, Any]) -> list[list[int]]:
    """DDP's own buckets once it has rebuilt them, in its second step or, of a static graph, in its third."""
    ddp = DDP(model, **ddp_options)
    noted: list[list[Tensor]] = []
    ddp.register_comm_hook(noted, _note_bucket)
    for step in range(3):
        noted.clear()
        sim.batch_loss(ddp, step, dist.get_rank()).backward()
    place = {id(parameter): index for index, parameter in enumerate(ddp.module.parameters())}
    return [[place[id(parameter)] for parameter in bucket] for bucket in noted]


def _qadam(options: dict[str, Any], **settings: Any) -> Run:
    return Run(sim.narrow_model(), "qadam", options, qadam, **settings)


def _follow(pool: RankPool, run: Run, tolerance: float = TOLERANCE) -> list[Training]:
    layout = pool.run(_ddp_layout, run.model, run.ddp_options or {})[0]
    assert (len(layout) > 2) == (run.ddp_options == SMALL_BUCKETS)
    trainings = pool.run(train_rank, run)
    assert_follows(trainings, _simulate(run, pool.world_size, layout), tolerance)
    for training in trainings:
        assert same(training.weights, trainings[0].weights), "ranks hold the same bits after every step"
    return trainings


@pytest.mark.parametrize("options", [FLAT, {}], ids=str)
def test_qadam_on_one_host(ranks: RankPool, options: dict[str, Any]) -> None:
    _follow(ranks, _qadam(options))


@pytest.mark.parametrize("hosts", ["AAB", "ABAB", "ABCD"])
def test_qadam_between_hosts(rank_pools: Pools, hosts: str) -> None:
    # A code of a host's share may be its neighbour's, because the share is scaled in another place: range / 255 of a
    # moment below 10, times the learning rate, over the square root of the second moment. With int8 one such code leads
    # one of these trainings elsewhere.
    _follow(rank_pools[len(hosts)], _qadam({"codec": "minmax_uint8"}, hosts=hosts), SEVERAL_BUCKETS)


@pytest.mark.parametrize("options", [FLAT, {}], ids=str)
def test_qadam_under_several_buckets(rank_pools: Pools, options: dict[str, Any]) -> None:
    _follow(rank_pools[3], _qadam(options, ddp_options=SMALL_BUCKETS)._replace(model=perceptron()), SEVERAL_BUCKETS)


@in_other_loops
def test_qadam_in_other_loops(rank_pools: Pools, loop: str) -> None:
    _follow(rank_pools[2], _qadam(FLAT, **OTHER_LOOPS[loop]))


def _zeroed(set_to_none: bool) -> list[Tensor]:
    ddp = DDP(sim.narrow_model())
    optimizer = bagua.QAdamOptimizer(two_groups(ddp), warmup_steps=2)
    bagua.register_comm_hook(ddp, "qadam", optimizer=optimizer, **FLAT)
    history = []
    for number in range(10):
        optimizer.zero_grad(set_to_none=set_to_none)
        sim.batch_loss(ddp, number, dist.get_rank()).backward()
        optimizer.step()
        history.append(sim.flat(ddp.parameters()))
    return history


@on_ranks(2)
def test_gradients_set_to_zero_or_to_none_give_the_same_bits() -> None:
    assert same(_zeroed(True), _zeroed(False))


def _warm_up(dtype: torch.dtype, ddp_options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Of qadam, and of stock DDP with torch's Adam."""
    model = perceptron().to(dtype)
    histories: list[list[Tensor]] = []
    with new_group(backend="gloo") as gloo:
        for hooked in (True, False):
            ddp = DDP(copy.deepcopy(model), process_group=None if hooked else gloo, **ddp_options)
            optimizer: torch.optim.Optimizer
            if hooked:
                optimizer = bagua.QAdamOptimizer(two_groups(ddp), warmup_steps=STEPS + 1)
                bagua.register_comm_hook(ddp, "qadam", optimizer=optimizer)
            else:
                optimizer = torch.optim.Adam(two_groups(ddp))
            histories.append([])
            for step in range(STEPS):
                take_step(ddp, optimizer, [sim.Batch(step)])
                histories[-1].append(sim.flat(ddp.parameters()))
    return histories[0], histories[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ddp_options", [{}, SMALL_BUCKETS], ids=["one_bucket", "several_buckets"])
@on_ranks(2)
def test_the_warm_up_is_adam_to_the_bit(dtype: torch.dtype, ddp_options: dict[str, Any]) -> None:
    # Two ranks: adding two halves is halving their sum, so that DDP's own mean has the same bits.
    ours, stock = _warm_up(dtype, ddp_options)
    assert ours[0].dtype == dtype
    assert same(ours, stock)


def test_without_a_hook_the_moments_go_on_locally() -> None:
    """After the warm-up second moments rest, and the first go on without decay, each by the settings of its group."""
    ours, reference = sim.narrow_model(), sim.narrow_model()
    optimizer = bagua.QAdamOptimizer(two_groups(ours), warmup_steps=WARMUP)
    expected = sim.ReferenceQAdam(two_groups(reference), WARMUP)
    for number in range(STEPS):
        for model, stepped in ((ours, optimizer), (reference, expected)):
            stepped.zero_grad()
            sim.batch_loss(model, number, 0).backward()
        for group in expected.param_groups if number >= WARMUP else ():
            for p in group["params"]:
                assert p.grad is not None
                p.grad.lerp_(expected.moments(p)[0], group["betas"][0])
        optimizer.step()
        expected.step()
        torch.testing.assert_close(
            sim.flat(ours.parameters()), sim.flat(reference.parameters()), rtol=0, atol=ONE_BUCKET
        )
