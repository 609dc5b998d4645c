# SPDX-License-Identifier: Apache-2.0
"""Hooks on stock DistributedDataParallel in each of its modes, against DDP without a hook and the definition."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import STOCK_BACKEND, here
from hooked_models import (
    SMALL_BUCKETS,
    Leaves,
    Spy,
    gradients_of,
    loss_of,
    new_group,
    perceptron,
    random_gradient,
    reduced,
    same,
    same_everywhere,
    train,
    train_without_bagua,
    with_hook,
)
from ranks import Pools, RankPool, on_ranks
from reference import FLOATS, for_each
from test_bytegrad_definition import defined_result
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

MODES: dict[str, dict[str, Any]] = {
    "one_bucket": {},
    "small_buckets": SMALL_BUCKETS,
    "gradient_as_bucket_view": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static_graph": {**SMALL_BUCKETS, "static_graph": True},
    "static_graph_as_view": {**SMALL_BUCKETS, "static_graph": True, "gradient_as_bucket_view": True},
    "find_unused_parameters": {**SMALL_BUCKETS, "find_unused_parameters": True},
}
in_every_mode = pytest.mark.parametrize("mode", MODES)
exact_and_coded = pytest.mark.parametrize(
    ("algorithm", "options"), [("gradient_allreduce", {}), ("bytegrad", {"hierarchical": False})], ids=str
)


class Branches(nn.Module):
    """In step 0 every rank takes a branch of its own, in step 1 all take the first; nobody ever takes the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(23, 17)
        self.branches = nn.ModuleList(nn.Linear(17, 11) for _ in range(5))
        self.step = 0

    def forward(self, batch: Tensor) -> Tensor:
        branch = dist.get_rank() if self.step % 2 == 0 else 0
        self.step += 1
        result: Tensor = self.branches[branch](self.trunk(batch))
        return result


# Two ranks: adding two halves is halving their sum, so equal to the bit. More ranks: next test.
@in_every_mode
@on_ranks(2)
def test_gradient_allreduce_is_ddp_to_the_bit(mode: str) -> None:
    hooked = train(perceptron(), with_hook("gradient_allreduce"), **MODES[mode])
    assert same(hooked, train_without_bagua(perceptron(), **MODES[mode]))


@on_ranks("ranks")
@for_each(list(itertools.product([(1,), (3,), (501, 96), (20_011,)], FLOATS)))
def test_gradient_allreduce_is_the_mean_and_the_same_everywhere(case: tuple[tuple[int, ...], torch.dtype]) -> None:
    lengths, dtype = case
    ddp = DDP(Leaves(*lengths, dtype=dtype))
    bagua.register_comm_hook(ddp, "gradient_allreduce")
    for step in range(3):
        all_given = [[random_gradient(n, rank, step, dtype) for n in lengths] for rank in range(dist.get_world_size())]
        result = torch.cat(reduced(ddp, all_given[dist.get_rank()]))
        assert result.dtype == dtype
        given = torch.stack([torch.cat(of_rank).double() for of_rank in all_given])
        # n - 1 additions and a division, each rounding a number below the magnitudes added up.
        bound = given.abs().sum(0) * len(given) * torch.finfo(dtype).eps
        assert ((result.double() - given.mean(0)).abs() <= bound).all()
        assert same_everywhere(result)


@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS, {"gradient_as_bucket_view": True}], ids=str)
@on_ranks(2)
def test_unused_parameters_that_differ_by_rank(options: dict[str, Any]) -> None:
    options = {"find_unused_parameters": True, **options}
    hooked = train(Branches(), with_hook("gradient_allreduce"), **options)
    assert hooked[0]["branches.4.weight"] is None
    assert hooked[0]["branches.1.weight"] is not None
    assert same(hooked, train_without_bagua(Branches(), **options))


def _watched(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same training three times: watched, and with either form of the hook."""
    make = {"perceptron": perceptron, "branches": Branches}[model]
    spy = Spy("bytegrad", hierarchical=False)
    watched = train(make(), spy.register, **options)
    registered = train(make(), with_hook("bytegrad", hierarchical=False), **options)
    return {"given": spy.given, "results": spy.results, "watched": watched, "registered": registered}


def _check_watched(runs: list[dict[str, Any]]) -> None:
    for number, result in enumerate(runs[0]["results"]):
        assert same(result, defined_result([run["given"][number] for run in runs])), f"bucket {number}"
    for run in runs:
        assert same(run["watched"], run["registered"])
        assert same(run["registered"], runs[0]["registered"])


@in_every_mode
def test_bytegrad_is_as_defined(rank_pools: Pools, mode: str) -> None:
    runs = rank_pools[3].run(_watched, "perceptron", MODES[mode])
    _check_watched(runs)
    if mode == "small_buckets":
        assert len(runs[0]["given"]) >= 1 + 2 * 3, "one bucket in the first step, and several in the two after it"


def test_bytegrad_with_unused_parameters(rank_pools: Pools) -> None:
    _check_watched(rank_pools[3].run(_watched, "branches", {"find_unused_parameters": True, **SMALL_BUCKETS}))


@pytest.fixture(scope="module")
def over_stock() -> Iterator[RankPool]:
    """Ranks whose process group is stock Gloo, or NCCL."""
    with RankPool(3, STOCK_BACKEND) as pool:
        yield pool


def test_bytegrad_over_a_stock_backend_is_as_defined(over_stock: RankPool) -> None:
    _check_watched(over_stock.run(_watched, "perceptron", MODES["gradient_as_bucket_view"]))


def _user_collectives_beside_the_hook() -> None:
    rank, size, steps = dist.get_rank(), dist.get_world_size(), 4
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


def test_user_collectives_run_beside_the_hook(rank_pools: Pools, over_stock: RankPool) -> None:
    rank_pools[3].run(_user_collectives_beside_the_hook)
    over_stock.run(_user_collectives_beside_the_hook)


@on_ranks(3, timeout=40.0)
def test_a_hook_may_outlive_its_group() -> None:
    for step in range(15):
        with new_group() as group:
            ddp = DDP(Leaves(1003), process_group=group)
            bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
            ddp([random_gradient(1003, dist.get_rank(), step)]).backward()
        # The model, and with it the hook, is the last to hold the group, right after its last program.
        del ddp, group


def _accumulate(algorithm: str, options: dict[str, Any], as_view: bool) -> list[Tensor]:
    ddp = DDP(Leaves(1003), gradient_as_bucket_view=as_view)
    handle = bagua.register_comm_hook(ddp, algorithm, **options)
    rank, results = dist.get_rank(), []
    for step in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp([random_gradient(1003, rank, step)]).backward()
        assert same(ddp.module.leaves[0].grad, random_gradient(1003, rank, step))
        ddp([random_gradient(1003, rank + 10, step)]).backward()
        results.append(ddp.module.leaves[0].grad.clone())
    assert handle.stats()["steps"] == 2
    return results


@pytest.mark.parametrize("as_view", [False, True], ids=["own_gradients", "bucket_views"])
@exact_and_coded
def test_gradients_accumulated_under_no_sync_are_reduced_once(
    rank_pools: Pools, algorithm: str, options: dict[str, Any], as_view: bool
) -> None:
    for results in rank_pools[2].run(_accumulate, algorithm, options, as_view):
        for step, result in enumerate(results):
            given = [random_gradient(1003, r, step) + random_gradient(1003, r + 10, step) for r in range(2)]
            assert same(result, defined_result(given) if algorithm == "bytegrad" else (given[0] + given[1]) / 2)


@on_ranks(2)
def test_several_models_of_one_process_do_not_meet() -> None:
    first, second = perceptron(), nn.Sequential(nn.Linear(23, 13), nn.Linear(13, 3))
    apart = [
        train(first, with_hook("bytegrad", hierarchical=False), steps=1)[0],
        train(second, with_hook("gradient_allreduce"), steps=1)[0],
    ]
    together = [DDP(copy.deepcopy(first)), DDP(copy.deepcopy(second)), DDP(copy.deepcopy(second))]
    bagua.register_comm_hook(together[0], "bytegrad", hierarchical=False)
    bagua.register_comm_hook(together[1], "gradient_allreduce")
    # One backward pass through all three, the last of them without a hook.
    torch.stack([loss_of(ddp, 0) for ddp in together]).sum().backward()
    assert same(gradients_of(together[0]), apart[0])
    assert same(gradients_of(together[1]), apart[1])
    assert same(gradients_of(together[2]), apart[1])


def _scaled_training(algorithm: str, options: dict[str, Any]) -> list[tuple[float, list[Tensor]]]:
    model = perceptron()
    ddp = DDP(model)
    bagua.register_comm_hook(ddp, algorithm, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    history = []
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and dist.get_rank() == 2 else 1.0
        scaler.scale(loss_of(ddp, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
    return history


@exact_and_coded
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    rank_pools: Pools, algorithm: str, options: dict[str, Any]
) -> None:
    histories = rank_pools[3].run(_scaled_training, algorithm, options)
    for history in histories:
        assert [scale for scale, _ in history] == [1024.0, 512.0, 512.0]
        weights = [weights for _, weights in history]
        assert same(weights[0], weights[1]), "the step was taken"
        assert not same(weights[1], weights[2])
        assert same(weights, [w for _, w in histories[0]])


@exact_and_coded
@on_ranks(3)
def test_sparse_gradients_are_averaged_in_full_precision(algorithm: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 9, sparse=True, mode="sum"), nn.Linear(9, 4))
    ddp = DDP(copy.deepcopy(model))
    bagua.register_comm_hook(ddp, algorithm, **options)
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.device("cpu"):
        drawn = [torch.randint(0, 50, (5, 3), generator=torch.Generator().manual_seed(r)) for r in range(size)]
    batches = [here(batch) for batch in drawn]
    result = torch.empty(0)
    for _ in range(2):
        ddp.zero_grad()
        ddp(batches[rank]).square().mean().backward()
        result = ddp.module[0].weight.grad
        assert result.is_sparse
    exact = torch.zeros(50, 9, dtype=torch.float64)
    for batch in batches:
        model.zero_grad()
        model(batch).square().mean().backward()
        exact += model[0].weight.grad.to_dense().double()
    # A few additions of float32.
    torch.testing.assert_close(result.to_dense().double(), exact / size, rtol=8e-7, atol=1e-9)


def _uneven(algorithm: str, options: dict[str, Any]) -> list[Tensor]:
    ddp = DDP(Leaves(1003))
    bagua.register_comm_hook(ddp, algorithm, **options)
    results = []
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            ddp.zero_grad()
            ddp([random_gradient(1003, dist.get_rank(), step)]).backward()
            results.append(ddp.module.leaves[0].grad.clone())
    return results


@exact_and_coded
def test_join_counts_ranks_without_input_as_zeros(rank_pools: Pools, algorithm: str, options: dict[str, Any]) -> None:
    first, second = rank_pools[2].run(_uneven, algorithm, options)
    assert len(first) == 2
    assert same(first, second[:2])
    given = [torch.zeros(1003), random_gradient(1003, 1, 2)]
    assert same(second[2], defined_result(given) if algorithm == "bytegrad" else given[1] / 2)


@on_ranks(2)
def test_join_that_divides_by_the_ranks_left_raises() -> None:
    ddp = DDP(Leaves(3))
    bagua.register_comm_hook(ddp, "gradient_allreduce")
    with (
        pytest.raises(RuntimeError, match=r"divide_by_initial_world_size=False.* not supported"),
        ddp.join(divide_by_initial_world_size=False),
    ):
        ddp([torch.ones(3)])


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).bfloat16())


# DDP hands over a bucket for each dtype in that step, and each as the first one.
@on_ranks(2)
def test_the_first_step_of_a_static_graph_is_one_step_of_all_its_buckets() -> None:
    ddp = DDP(_TwoDtypes(), static_graph=True)
    handle = bagua.register_comm_hook(ddp, "quantized_allreduce", codec="4bit", hierarchical=False)
    ddp(torch.randn(8, 40)).square().sum().backward()
    state = handle.state_dict()
    assert state["step"] == 1
    assert state["state"]["sender.4bit.0"].any()
