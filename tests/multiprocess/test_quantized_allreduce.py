# SPDX-License-Identifier: Apache-2.0
"""quantized_allreduce: nothing is lost but what the residuals hold, and what is exact is exact."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, emulated_hosts, same, same_everywhere
from ranks import Pools, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Weights, a bias and a small matrix between them; buckets are rebuilt after the first step.
SHAPES = [(40, 130), (40,), (64, 70), (7, 5), (50, 90)]
EXACT = [1, 3]
FLAT: dict[str, Any] = {"hierarchical": False}
FEEDBACK: dict[str, Any] = {"error_feedback": True}


def gradients_of(step: int, rank: int, part: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return [torch.randn(shape, generator=generator) * (1 + i) + 0.3 for i, shape in enumerate(SHAPES)]


class Trained(NamedTuple):
    ddp: DDP
    handle: bagua.Handle


def _make(group: dist.ProcessGroup, **options: Any) -> Trained:
    ddp = DDP(Leaves(*SHAPES), process_group=group, bucket_cap_mb=0.03)
    return Trained(ddp, bagua.register_comm_hook(ddp, "quantized_allreduce", **options))


def _take(ddp: DDP, parts: list[list[Tensor]]) -> list[Tensor]:
    """What the optimizer sees after the backwards of a step, of which the last is synchronised."""
    ddp.zero_grad()
    for i, gradients in enumerate(parts):
        with ExitStack() as stack:
            if i < len(parts) - 1:
                stack.enter_context(ddp.no_sync())
            ddp(gradients).backward()
    return [p.grad.detach().clone() for p in ddp.module.parameters() if p.grad is not None]


def _owed(handle: bagua.Handle, codec: str, *, is_mean: bool) -> list[Tensor]:
    """What the residuals of all ranks will still add to the results, by parameter."""
    state = handle.state_dict()["state"]
    size = dist.get_world_size()
    total = []
    for i, shape in enumerate(SHAPES):
        owed = torch.zeros(shape).double().flatten()
        sender = state.get(f"sender.{codec}.{i}")
        if sender is not None:
            owed += sender.double() / (size if is_mean else 1)
        owner = state.get(f"owner.{codec}.{i}")
        if owner is not None:
            pieces = state.get(f"owner.{codec}.{i}.pieces", torch.tensor([[0, owed.numel()]]))
            begin = 0
            for first, last in pieces.tolist():
                owed[first:last] += owner[begin : begin + last - first].double()
                begin += last - first
        dist.all_reduce(owed)
        total.append(owed.view(shape))
    return total


@pytest.mark.parametrize(
    ("codec", "average", "residuals"),
    [
        ("4bit", True, "float32"),
        ("2bit", True, "float32"),
        ("1bit", True, "float32"),
        ("int8", False, "float32"),
        ("4bit", True, "8bit"),
        pytest.param("minmax_uint8", True, "float32", marks=pytest.mark.long),
    ],
)
@on_ranks("peers")
def test_what_was_seen_and_what_is_owed_is_what_went_in(codec: str, average: bool, residuals: str) -> None:
    steps = 60
    with emulated_hosts("h" * dist.get_world_size()) as group:
        size = dist.get_world_size()
        options = {**FLAT, **FEEDBACK, "codec": codec, "average": average, "residuals": residuals}
        trained = _make(group, **options)
        seen = [torch.zeros(shape).double() for shape in SHAPES]
        true = [torch.zeros(shape).double() for shape in SHAPES]
        for step in range(steps):
            count = 3 if step % 7 == 3 else 1  # accumulation
            given = [[gradients_of(step, rank, part) for part in range(count)] for rank in range(size)]
            if step in (5, steps // 2):
                before = trained.handle.state_dict()["state"]
                broken = [[g.clone() for g in part] for part in given[dist.get_rank()]]
                if dist.get_rank() == size - 1:
                    broken[-1][2][3, 4] = float("nan") if step == 5 else float("inf")
                results = _take(trained.ddp, broken)
                assert not all(bool(r.isfinite().all()) for r in results)
                # Not even by the buckets that had nothing to do with it.
                assert same(before, trained.handle.state_dict()["state"])
            if step == steps // 3:
                saved = trained.handle.state_dict()
                trained = _make(group, **options)
                trained.handle.load_state_dict(saved)
                assert same(saved["state"], trained.handle.state_dict()["state"])
            results = _take(trained.ddp, given[dist.get_rank()])
            for i, result in enumerate(results):
                mean = sum(sum(part[i].double() for part in of_rank) for of_rank in given) / (size if average else 1)
                seen[i] += result.double()
                true[i] += mean
                if i in EXACT:
                    assert torch.allclose(result.double(), mean, rtol=1e-6, atol=1e-5)
        for i, owed in enumerate(_owed(trained.handle, codec, is_mean=average)):
            if residuals == "8bit":
                # A moving average owes five times itself, but for the rounding to 8 bits in each step.
                assert (seen[i] + 5 * owed - true[i]).norm() <= 0.3 * (seen[i] - true[i]).norm() + 1e-3
                continue
            # Each step rounds a few float32 numbers of about ten.
            difference = (seen[i] + owed - true[i]).abs().max()
            assert difference < steps * 3e-6 * (1 if average else size), f"parameter {i}: {difference}"
        state_bytes = trained.handle.stats()["state_bytes"]
        coded = sum(torch.zeros(SHAPES[i]).numel() for i in (0, 2, 4))
        assert state_bytes > 2 * 4 * coded if residuals == "float32" else state_bytes < 2 * 2 * coded


# --- residuals in 8 bits ---


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


def _gradient_of(module: nn.Linear) -> Tensor:
    assert module.weight.grad is not None
    return module.weight.grad.flatten().clone()


@on_ranks("peers")
def test_residuals_in_8_bits_are_those_of_loco() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    length = size * 128 * 5
    module = nn.Linear(128, length // 128, bias=False)
    ddp = DDP(module)
    handle = bagua.register_comm_hook(ddp, "quantized_allreduce", **FLAT, codec={"*": "4bit"}, residuals="8bit")
    sender, owner = torch.zeros(length), torch.zeros(length // size)
    seen, true = torch.zeros(length).double(), torch.zeros(length).double()
    for step in range(40):
        gradients = [torch.randn(length, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(size)]
        ddp.zero_grad()
        ddp(torch.eye(128)).T.flatten().dot(gradients[rank]).backward()
        result = _gradient_of(module)
        # LoCo's rule, at the sender and at the owner.
        held = gradients[rank] + sender
        sent = _coded(held)
        mean = torch.stack(sent).mean(0).chunk(size)[rank] + owner
        results = _coded(mean)
        _assert_close(result, torch.cat(results), 0.01)
        expected = [
            _in_8_bits(0.8 * sender + 0.2 * (held - sent[rank])),
            _in_8_bits(0.8 * owner + 0.2 * (mean - results[rank])),
        ]
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
        trained = _make(group, **options)
        results = []
        for step in range(steps):
            if step == saved_at:
                saved = trained.handle.state_dict()
                trained = _make(group, **options)
                trained.handle.load_state_dict(saved)
            results = _take(trained.ddp, [gradients_of(step, dist.get_rank())])
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
@on_ranks("peers")
def test_a_continued_run_has_the_bits_of_an_unbroken_one(hosts: str, options: Any) -> None:
    hosts, options = hosts[: dist.get_world_size()], {**FEEDBACK, **options}
    whole = _trained(hosts, 12, None, **options)
    assert same(whole, _trained(hosts, 12, 6, **options))
    assert same_everywhere(*whole)


def _seen_and_owed(first: int, saved: list[dict[str, Any]], codec: str) -> tuple[float, dict[str, Any]]:
    with emulated_hosts("h" * dist.get_world_size()) as group:
        size, rank = dist.get_world_size(), dist.get_rank()
        trained = _make(group, **FLAT, **FEEDBACK, codec=codec)
        if saved:
            # A new rank has the buckets and steps of the others, and no residuals.
            trained.handle.load_state_dict(saved[rank] if rank < len(saved) else {**saved[0], "state": {}})
        owed = _owed(trained.handle, codec, is_mean=True)
        for step in range(first, first + 9):
            given = [gradients_of(step, each) for each in range(size)]
            for i, result in enumerate(_take(trained.ddp, [given[rank]])):
                owed[i] += sum(gradients[i].double() for gradients in given) / size - result.double()
        left = _owed(trained.handle, codec, is_mean=True)
        return max((one - other).abs().max().item() for one, other in zip(owed, left, strict=True)), (
            trained.handle.state_dict()
        )


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_on_another_number_of_ranks_what_their_residuals_hold_is_still_owed(
    rank_pools: Pools, before: int, after: int
) -> None:
    saved = [state for _, state in rank_pools[before].run(_seen_and_owed, 0, [], "2bit")]
    for error, _ in rank_pools[after].run(_seen_and_owed, 9, saved, "2bit"):
        assert error < 3e-5


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
    ddp = DDP(Leaves(*SHAPES), bucket_cap_mb=0.03)
    handle = bagua.register_comm_hook(ddp, algorithm, **FLAT, codec="4bit", start_step=start)
    ranks = range(dist.get_world_size())
    for step in range(start + 2):
        if step == 2:  # the number of a step is that of the whole training
            saved = handle.state_dict()
            ddp = DDP(Leaves(*SHAPES), bucket_cap_mb=0.03)
            handle = bagua.register_comm_hook(ddp, algorithm, **FLAT, codec="4bit", start_step=start)
            handle.load_state_dict(saved)
        results = _take(ddp, [gradients_of(step, dist.get_rank())])
        means = [sum(parts) / len(ranks) for parts in zip(*(gradients_of(step, r) for r in ranks), strict=True)]
        is_exact = [torch.allclose(r, m, atol=1e-6) for r, m in zip(results, means, strict=True)]
        assert all(is_exact) == (step < start), step


@on_ranks("peers")
def test_4bit_sends_less_than_15_percent_of_float32() -> None:
    with emulated_hosts("ABCD"[: dist.get_world_size()]) as group:
        ddp = DDP(nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1)), process_group=group)
        handle = bagua.register_comm_hook(ddp, "quantized_allreduce")
        for step in range(4):
            ddp(torch.randn(3, 1000, generator=torch.Generator().manual_seed(step))).sum().backward()
        stats, size = handle.stats(), dist.get_world_size()
        assert stats["wire_bytes"] / (stats["logical_bytes"] * 2 * (size - 1) / size) < 0.15
