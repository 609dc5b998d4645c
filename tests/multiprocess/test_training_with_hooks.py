# SPDX-License-Identifier: Apache-2.0
"""Hooks in whole training runs: over a stock backend, beside collectives of the user, to convergence."""

from collections.abc import Iterator
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import STOCK_BACKEND, randn
from hooked_models import (
    SMALL_BUCKETS,
    Gradients,
    Leaves,
    Spy,
    new_group,
    perceptron,
    random_gradient,
    same,
    train,
    with_hook,
)
from ranks import Pools, RankPool
from test_bytegrad_definition import defined_result
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device


@pytest.fixture(scope="module")
def over_stock() -> Iterator[RankPool]:
    """Ranks whose process group is stock Gloo, or NCCL."""
    with RankPool(3, STOCK_BACKEND) as pool:
        yield pool


def _user_collectives_beside_the_hook(steps: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DDP(Leaves(300, 400, 500), bucket_cap_mb=0.001)
    bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
    seen = []

    def user_sum(gradient: Tensor) -> None:
        token = gradient.new_tensor([float(rank + 1)])
        dist.all_reduce(token)  # while the buckets of the other parameters are on their way
        seen.append(token.item())

    for leaf in ddp.module.leaves:
        leaf.register_hook(user_sum)
    for step in range(steps):
        ddp.zero_grad()
        works = [dist.all_reduce(torch.full((1000,), float(i)), async_op=True) for i in range(4)]
        ddp([random_gradient(n, rank, step) for n in (300, 400, 500)]).backward()
        for factor, work in enumerate(works):
            work.wait()
            assert torch.equal(work.result()[0], torch.full((1000,), float(factor * size)))
    assert seen == [size * (size + 1) / 2] * (3 * steps)


def test_user_collectives_run_beside_the_hook(peers: RankPool) -> None:
    peers.run(_user_collectives_beside_the_hook, 4)


def test_user_collectives_run_beside_a_hook_over_a_stock_backend(over_stock: RankPool) -> None:
    over_stock.run(_user_collectives_beside_the_hook, 4)


def _watched(as_view: bool) -> tuple[list[Tensor], list[Tensor], bool]:
    spy = Spy("bytegrad", hierarchical=False)
    options = {**SMALL_BUCKETS, "gradient_as_bucket_view": as_view}
    watched = train(perceptron(), spy.register, **options)
    return (
        spy.given,
        spy.results,
        same(watched, train(perceptron(), with_hook("bytegrad", hierarchical=False), **options)),
    )


@pytest.mark.parametrize("as_view", [False, True], ids=["own_gradients", "bucket_views"])
def test_bytegrad_over_a_stock_backend_is_as_defined(over_stock: RankPool, as_view: bool) -> None:
    given, results, forms_agree = zip(*over_stock.run(_watched, as_view), strict=True)
    assert all(forms_agree)
    for number, buckets in enumerate(zip(*given, strict=True)):
        expected = defined_result(list(buckets))
        assert all(torch.equal(result[number], expected) for result in results), f"bucket {number}"


def _one_group_after_another(count: int) -> None:
    for step in range(count):
        with new_group() as group:
            ddp = DDP(Leaves(1003), process_group=group)
            bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
            ddp([random_gradient(1003, dist.get_rank(), step)]).backward()
        # The model, and with it the hook, is the last to hold the group, right after its last program.
        del ddp, group


def test_a_hook_may_outlive_its_group(peers: RankPool) -> None:
    peers.run(_one_group_after_another, 15, timeout=40.0)


def _converge(algorithm: str, options: dict[str, Any]) -> tuple[list[float], list[Gradients]]:
    """Final and first loss of a regression with noise; the history."""
    slope = randn(23, 7, seed=9)
    losses = []

    def regression(model: nn.Module, step: int) -> Tensor:
        seed = 100 * step + dist.get_rank()
        inputs = randn(32, 23, seed=seed)
        targets = inputs @ slope + 0.1 * randn(32, 7, seed=seed + 50)
        loss: Tensor = (model(inputs) - targets).square().mean()
        losses.append(loss.item())
        return loss

    torch.manual_seed(1)
    model = nn.Linear(23, 7)
    history = train(model, with_hook(algorithm, **options), steps=50, loss=regression, learning_rate=0.8)
    return losses, history


def test_training_reaches_the_loss_of_full_precision_and_repeats(rank_pools: Pools) -> None:
    two = rank_pools[2]
    plain = two.run(_converge, "gradient_allreduce", {})
    coded = two.run(_converge, "bytegrad", {"hierarchical": False})
    again = two.run(_converge, "bytegrad", {"hierarchical": False})
    for rank in range(2):
        losses, history = coded[rank]
        assert losses == again[rank][0]
        assert same(history, again[rank][1])
        assert same(history, coded[0][1])
        full = plain[rank][0]
        assert full[-1] < 0.1 * full[0], "the task is learnt"
        # The rounding of the gradients is far below the noise of the batches they come from.
        assert sum(losses[-10:]) < 1.1 * sum(full[-10:])
