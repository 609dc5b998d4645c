# SPDX-License-Identifier: Apache-2.0
"""quantized_allreduce: residuals in 8 bits, checkpoints, steps that are exact. test_error_feedback.py has the sums."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, emulated_hosts, reduced, same, same_everywhere
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Weights, a bias and a small matrix between them; buckets are rebuilt after the first step.
SHAPES = [(40, 130), (40,), (64, 70), (7, 5), (50, 90)]
FLAT: dict[str, Any] = {"hierarchical": False}
FEEDBACK: dict[str, Any] = {"error_feedback": True}


def gradients_of(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank)
    return [torch.randn(shape, generator=generator) * (1 + i) + 0.3 for i, shape in enumerate(SHAPES)]


def _made(algorithm: str, group: dist.ProcessGroup | None = None, **options: Any) -> tuple[DDP, bagua.Handle]:
    ddp = DDP(Leaves(*SHAPES), process_group=group, bucket_cap_mb=0.03)
    return ddp, bagua.register_comm_hook(ddp, algorithm, **options)


def _in_8_bits(values: Tensor) -> Tensor:
    """Groups of 128 with a power of two as the scale."""
    groups = values.view(-1, 128)
    scale = 2.0 ** (groups.abs().amax(1, keepdim=True) / 127).log2().ceil()
    return torch.where(scale > 0, (groups / scale).round() * scale, groups).view(-1)


def _coded(values: Tensor) -> list[Tensor]:
    """What all ranks decode of each rank's values."""
    all_values = torch.empty(dist.get_world_size() * values.numel())
    bagua.compressed.all_gather_into_tensor(all_values, values, codec="4bit")
    return list(all_values.chunk(dist.get_world_size()))


def _assert_close(one: Tensor, other: Tensor, most: float) -> None:
    """Where additions are rounded otherwise, a value between two codes may take the other one."""
    assert (one - other).norm() <= most * other.norm()


@on_ranks(3)
def test_residuals_in_8_bits_are_those_of_loco() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    length = size * 128 * 5
    ddp = DDP(nn.Linear(128, length // 128, bias=False))
    handle = bagua.register_comm_hook(ddp, "quantized_allreduce", **FLAT, codec={"*": "4bit"}, residuals="8bit")
    sender, owner = torch.zeros(length), torch.zeros(length // size)
    seen, true = torch.zeros(length).double(), torch.zeros(length).double()
    for step in range(40):
        gradients = [torch.randn(length, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(size)]
        ddp.zero_grad()
        ddp(torch.eye(128)).T.flatten().dot(gradients[rank]).backward()
        result = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
        # LoCo's rule, at the sender and at the owner.
        held = gradients[rank] + sender
        sent = _coded(held)
        mean = torch.stack(sent).mean(0).chunk(size)[rank] + owner
        results = _coded(mean)
        _assert_close(result, torch.cat(results), 0.01)
        left = ((sender, held - sent[rank]), (owner, mean - results[rank]))
        expected = [_in_8_bits(0.8 * kept + 0.2 * rest) for kept, rest in left]
        state = handle.state_dict()["state"]
        sender, owner = state["sender.4bit.0"], state["owner.4bit.0"]
        _assert_close(sender, expected[0], 0.2)
        _assert_close(owner, expected[1], 0.2)
        seen += result.double()
        true += torch.stack(gradients).double().mean(0)
    # What is still owed is five times what is held, but for its rounding.
    owed = sender.double() / size
    owed[rank * (length // size) :][: length // size] += owner.double()
    dist.all_reduce(owed)
    assert (seen + 5 * owed - true).norm() < 0.2 * (seen - true).norm()
    # Two sets of n + n / W bytes, and an exponent for 128.
    assert handle.stats()["state_bytes"] == 2 * (length + length // size) * 129 / 128


def _trained(hosts: str, steps: int, saved_at: int | None, **options: Any) -> list[Tensor]:
    with emulated_hosts(hosts) as group:
        ddp, handle = _made("quantized_allreduce", group, **options)
        results = []
        for step in range(steps):
            if step == saved_at:
                saved = handle.state_dict()
                ddp, handle = _made("quantized_allreduce", group, **options)
                handle.load_state_dict(saved)
            results = reduced(ddp, gradients_of(step, dist.get_rank()))
        return results


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "4bit"},
        {"codec": "2bit", "rounding": "stochastic"},
        {"codec": {"leaves.0": "1bit", "*": "4bit"}, "residuals": "8bit"},
        {"codec": {"leaves.0": "1bit", "leaves.2": "int8", "*": "4bit"}, "exact": ("1d", "leaves.4")},
    ],
    ids=str,
)
@pytest.mark.parametrize("hosts", ["ABCD", "ABAC"])
@on_ranks(4)
def test_a_continued_run_has_the_bits_of_an_unbroken_one(hosts: str, options: Any) -> None:
    options = {**FEEDBACK, **options}
    whole = _trained(hosts, 12, None, **options)
    assert same(whole, _trained(hosts, 12, 6, **options))
    assert same_everywhere(*whole)


@on_ranks(2)
def test_residuals_stay_finite_whatever_is_added_to_them_or_multiplies_them() -> None:
    ddp = DDP(Leaves(*SHAPES, dtype=torch.float64), bucket_cap_mb=0.03)
    handle = bagua.register_comm_hook(ddp, "quantized_allreduce", **FLAT, **FEEDBACK, codec={"*": "1bit"}, exact=())
    # No float32 holds what the first step leaves. The new buckets of the second add the owners' residuals twice.
    for step, factor in enumerate([1e300, 1.0, 1.0, 1.0]):
        results = reduced(ddp, [given.double() * factor for given in gradients_of(step, dist.get_rank())])
        assert all(result.isfinite().all() for result in results), step
        if step == 2:
            handle.rescale(2.0**100)


@on_ranks(2)
def test_ranks_whose_optimizers_are_of_other_kinds_are_refused() -> None:
    ddp = DDP(Leaves(*SHAPES))
    kind = torch.optim.SGD if dist.get_rank() else torch.optim.AdamW
    with pytest.raises(ValueError, match="such as SGD"):
        bagua.register_comm_hook(ddp, "quantized_allreduce", optimizer=kind(ddp.parameters(), lr=0.1), codec="2bit")


@pytest.mark.parametrize("algorithm", ["bytegrad", "quantized_allreduce"])
@on_ranks(2)
def test_before_the_start_step_gradients_are_exact(algorithm: str) -> None:
    start = 3
    make = partial(_made, algorithm, **FLAT, codec="4bit", start_step=start)
    ddp, handle = make()
    for step in range(start + 2):
        if step == 2:  # the number of a step is that of the whole training
            saved = handle.state_dict()
            ddp, handle = make()
            handle.load_state_dict(saved)
        results = reduced(ddp, gradients_of(step, dist.get_rank()))
        means = [sum(parts) / 2 for parts in zip(gradients_of(step, 0), gradients_of(step, 1), strict=True)]
        is_exact = [torch.allclose(r, m, atol=1e-6) for r, m in zip(results, means, strict=True)]
        assert all(is_exact) == (step < start), step


@on_ranks(2)
def test_the_scale_of_an_optimizer_that_accelerate_has_wrapped_is_followed() -> None:
    """Without a call of the user's."""
    ddp = DDP(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    # As accelerate's AcceleratedOptimizer is made.
    wrapped: Any = SimpleNamespace(optimizer=optimizer, scaler=scaler)
    options: dict[str, Any] = {**FLAT, "codec": {"*": "4bit"}, "exact": ()}
    handle = bagua.register_comm_hook(ddp, "quantized_allreduce", optimizer=wrapped, **options)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    scaler.scale(ddp(x).square().mean()).backward()
    before = handle.state_dict()["state"]
    scaler.step(optimizer)
    scaler.update(2.0)
    after = handle.state_dict()["state"]
    assert before["sender.4bit.0"].abs().max() > 0
    for name, values in before.items():
        if values.is_floating_point():
            assert torch.equal(after[name], values / 4), name
