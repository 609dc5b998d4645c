# SPDX-License-Identifier: Apache-2.0
"""Mixed precision, memory formats and torch.compile under DDP with hooks; on the CPU, too.

The modes of DDP itself (bucket views, no_sync, unused parameters, static graphs) are in multiprocess/test_ddp_hooks.py.
"""

import copy
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import here, randn
from hooked_models import SMALL_BUCKETS, gradients_of, loss_of, perceptron, same
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

HOOKS: list[tuple[str, dict[str, Any]]] = [
    ("gradient_allreduce", {}),
    ("gradient_allreduce", {"hierarchical": True}),
    ("bytegrad", {"hierarchical": False}),
]
with_every_hook = pytest.mark.parametrize(("algorithm", "options"), HOOKS, ids=str)
HALVES = [torch.bfloat16, torch.float16]


def _device_type() -> str:
    return torch.get_default_device().type


def _images(rank: int) -> Tensor:
    with torch.device("cpu"):
        images = randn(4, 3, 12, 12, seed=rank)
    return here(images)


def _convolutions() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten(), nn.Linear(320, 7))


def _exact_mean(model: nn.Module) -> list[Tensor]:
    """Of the gradients that every rank's batch would have alone, in the layout of the parameters."""
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(_images(rank).contiguous(memory_format=torch.channels_last)).square().mean().backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            assert p.grad is not None
            total += p.grad
    return [total / dist.get_world_size() for total in sums]


def _channels_last(algorithm: str, options: dict[str, Any], as_view: bool) -> list[Tensor]:
    model = _convolutions().to(memory_format=torch.channels_last)
    exact = _exact_mean(copy.deepcopy(model))
    ddp = DDP(model, gradient_as_bucket_view=as_view, **SMALL_BUCKETS)
    bagua.register_comm_hook(ddp, algorithm, **options)
    found: list[Tensor] = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(_images(dist.get_rank()).contiguous(memory_format=torch.channels_last)).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(found) == len(exact)
    for gradient, expected, p in zip(found, exact, model.parameters(), strict=True):
        assert gradient.stride() == p.stride()
        # Two codings of a code's step each, where there are any; else a few roundings and another order of sums.
        step = float(expected.max() - expected.min()) / 255
        bound = 3 * step + 1e-6 if algorithm == "bytegrad" else 1e-5
        assert (gradient - expected).abs().max() <= bound
    return found


@pytest.mark.parametrize("as_view", [False, True], ids=["own_gradients", "bucket_views"])
@with_every_hook
def test_channels_last_gradients_keep_their_places(
    peers: RankPool, algorithm: str, options: dict[str, Any], as_view: bool
) -> None:
    first, *others = peers.run(_channels_last, algorithm, options, as_view)
    assert all(same(other, first) for other in others)


def _autocast(algorithm: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
    ddp = DDP(perceptron(), **SMALL_BUCKETS)
    bagua.register_comm_hook(ddp, algorithm, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast(_device_type(), dtype):
            loss = loss_of(ddp, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@with_every_hook
def test_autocast_trains_the_same_weights_on_all_ranks(
    peers: RankPool, algorithm: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    results = peers.run(_autocast, algorithm, options, dtype)
    for losses, weights in results:
        assert losses[-1] < 0.9 * losses[0]
        assert all(weight.dtype == torch.float32 for weight in weights)
        assert same(weights, results[0][1])


def _overflow(algorithm: str, options: dict[str, Any]) -> list[tuple[float, list[Tensor]]]:
    """In step 1 the last rank alone has an input whose product is too large for half precision."""
    ddp = DDP(perceptron())
    bagua.register_comm_hook(ddp, algorithm, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(_device_type(), init_scale=256.0)
    history = []
    for step in range(3):
        optimizer.zero_grad()
        batch = randn(6, 23, seed=10 * step + dist.get_rank())
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            batch = batch * 60_000.0
        with torch.autocast(_device_type(), torch.float16):
            loss = ddp(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), [p.detach().clone() for p in ddp.parameters()]))
    return history


@with_every_hook
def test_a_true_overflow_of_half_precision_skips_the_step_on_all_ranks(
    peers: RankPool, algorithm: str, options: dict[str, Any]
) -> None:
    histories = peers.run(_overflow, algorithm, options)
    for history in histories:
        assert [scale for scale, _ in history] == [256.0, 128.0, 128.0]
        first, second, third = (weights for _, weights in history)
        assert same(first, second), "the step was taken"
        assert not same(second, third)
        assert same([first, third], [histories[0][0][1], histories[0][2][1]])


def _wide_perceptron() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(23, 700), nn.ReLU(), nn.Linear(700, 900), nn.ReLU(), nn.Linear(900, 7))


def _compiled(compiler: str, algorithm: str, options: dict[str, Any]) -> list[list[Tensor]]:
    """Gradients of three steps, plain and compiled."""
    from torch._inductor import config

    config.compile_threads = 1  # else each rank starts a process for each core
    results = []
    for compiled in (False, True):
        # torch's compiler splits the graph by bucket, and insists on a cap that is not below that of the first, 1 MiB.
        ddp = DDP(_wide_perceptron(), bucket_cap_mb=1)
        bagua.register_comm_hook(ddp, algorithm, **options)
        model: Any = torch.compile(ddp, backend=compiler) if compiled else ddp
        found: list[Tensor] = []
        for step in range(3):
            ddp.zero_grad()
            loss_of(model, step).backward()
            found += [gradient for gradient in gradients_of(ddp).values() if gradient is not None]
        results.append(found)
    return results


def _check_compiled(pool: RankPool, compiler: str, algorithm: str, options: dict[str, Any]) -> None:
    results = pool.run(_compiled, compiler, algorithm, options, timeout=120.0)
    for plain, compiled in results:
        assert len(plain) == len(compiled) == 3 * 6
        for one, other in zip(plain, compiled, strict=True):
            # Fused kernels round differently, and a number that rounds differently may fall to a neighbouring code.
            step = float(one.max() - one.min()) / 255
            assert (one - other).abs().max() <= 1e-5 + (3 * step if algorithm == "bytegrad" else 0.0)
        assert same(compiled, results[0][1])


@with_every_hook
def test_a_compiled_model_has_the_same_gradients(
    rank_pools: dict[int, RankPool], algorithm: str, options: dict[str, Any]
) -> None:
    _check_compiled(rank_pools[2], "aot_eager", algorithm, options)


@pytest.mark.cuda_only
@with_every_hook
def test_a_model_compiled_by_inductor_has_the_same_gradients(
    rank_pools: dict[int, RankPool], algorithm: str, options: dict[str, Any]
) -> None:
    _check_compiled(rank_pools[2], "inductor", algorithm, options)
