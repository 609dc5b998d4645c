# SPDX-License-Identifier: Apache-2.0
"""Memory formats and torch.compile under DDP with hooks; on the CPU, too.

The modes of DDP itself (bucket views, no_sync, unused parameters, static graphs), and steps that overflow, are in
multiprocess/test_ddp_hooks.py.
"""

import copy
from typing import Any

import bagua
import torch
import torch.distributed as dist
from check import assert_same_on_all_ranks, check
from devices import randn
from hooked_models import SMALL_BUCKETS, gradients_of, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

HOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce", {}),
    "hierarchical": ("gradient_allreduce", {"hierarchical": True}),
    "bytegrad": ("bytegrad", {"hierarchical": False}),
}


def _images(rank: int) -> Tensor:
    return randn(4, 3, 12, 12, seed=rank).contiguous(memory_format=torch.channels_last)


def _convolutions() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten(), nn.Linear(320, 7))


def _exact_mean(model: nn.Module) -> list[Tensor]:
    """Of the gradients that every rank's batch would have alone, in the layout of the parameters."""
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(_images(rank)).square().mean().backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            assert p.grad is not None
            total += p.grad
    return [total / dist.get_world_size() for total in sums]


@check({f"{name}.{view}": (*hook, view == "views") for name, hook in HOOKS.items() for view in ("copies", "views")})
def channels_last_gradients_keep_their_places(algorithm: str, options: dict[str, Any], as_view: bool) -> None:
    model = _convolutions().to(memory_format=torch.channels_last)
    exact = _exact_mean(copy.deepcopy(model))
    ddp = DDP(model, gradient_as_bucket_view=as_view, **SMALL_BUCKETS)
    bagua.register_comm_hook(ddp, algorithm, **options)
    found: list[Tensor] = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(_images(dist.get_rank())).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(found) == len(exact)
    for gradient, expected, p in zip(found, exact, model.parameters(), strict=True):
        assert gradient.stride() == p.stride()
        # Two codings of a code's step each, where there are any; else a few roundings and another order of sums.
        step = float(expected.abs().max()) / 126
        bound = 3 * step + 1e-6 if algorithm == "bytegrad" else 1e-5
        assert (gradient - expected).abs().max() <= bound
    assert_same_on_all_ranks(found)


def _wide_perceptron() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(23, 700), nn.ReLU(), nn.Linear(700, 900), nn.ReLU(), nn.Linear(900, 7))


def _compiled(compiler: str, algorithm: str, options: dict[str, Any]) -> None:
    """Gradients of three steps, plain and compiled."""
    from torch._inductor import config

    config.compile_threads = 1  # else each rank starts a process for each core
    results = []
    for is_compiled in (False, True):
        # torch's compiler splits the graph by bucket, and insists on a cap that is not below that of the first, 1 MiB.
        ddp = DDP(_wide_perceptron(), bucket_cap_mb=1)
        bagua.register_comm_hook(ddp, algorithm, **options)
        model: Any = torch.compile(ddp, backend=compiler) if is_compiled else ddp
        found: list[Tensor] = []
        for step in range(3):
            ddp.zero_grad()
            loss_of(model, step).backward()
            found += [gradient for gradient in gradients_of(ddp).values() if gradient is not None]
        results.append(found)
    plain, compiled = results
    assert len(plain) == len(compiled) == 3 * 6
    for one, other in zip(plain, compiled, strict=True):
        # Fused kernels round differently, and a number that rounds differently may fall to a neighbouring code.
        step_of_codes = float(one.abs().max()) / 126
        assert (one - other).abs().max() <= 1e-5 + (3 * step_of_codes if algorithm == "bytegrad" else 0.0)
    assert_same_on_all_ranks(compiled)


@check(HOOKS, sizes=(2,), seconds=60)
def compiled_model_has_the_same_gradients(algorithm: str, options: dict[str, Any]) -> None:
    _compiled("aot_eager", algorithm, options)


@check(HOOKS, sizes=(2,), seconds=60, cuda_only=True)
def model_compiled_by_inductor_has_the_same_gradients(algorithm: str, options: dict[str, Any]) -> None:
    _compiled("inductor", algorithm, options)
