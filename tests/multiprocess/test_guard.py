# SPDX-License-Identifier: Apache-2.0
"""The guard finds what a codec does not suit, says whose it is, and has gradients coded finer; else it is quiet."""

from collections.abc import Sequence
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, captured_stderr, emulated_hosts, optimizer_for, reduced, same
from ranks import Pools, on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

FLAT: dict[str, Any] = {"hierarchical": False}
# The second is in the chunks of both ranks.
SHAPES = [(20, 64), (380, 64)]
ONE: list[tuple[int, int]] = [(200, 64)]


def _gradients(
    step: int, rank: int, tails: Sequence[int] = (), shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    for layer in tails:
        drawn[layer].view(-1)[rank::64] *= 1000
    return drawn


def _off(results: list[Tensor], step: int, tails: Sequence[int]) -> list[float]:
    """By layer, how far typical values are from the mean of the ranks: the error of those that are no outliers."""
    ranks = range(dist.get_world_size())
    means = [
        torch.stack(of_layer).mean(0) for of_layer in zip(*(_gradients(step, r, tails) for r in ranks), strict=True)
    ]
    return [float((result - mean).abs().median()) for result, mean in zip(results, means, strict=True)]


# The guard looks at a bucket in two consecutive steps of each window of so many.
WINDOW = 128


def _with_tails(algorithm: str, options: dict[str, Any], windows: int) -> tuple[list[float], dict[str, Any]]:
    ddp = DDP(Leaves(*SHAPES))
    handle = bagua.register_comm_hook(ddp, algorithm, **FLAT, **options)
    rank = dist.get_rank()
    for step in range(100):
        reduced(ddp, _gradients(step, rank))
    assert handle.stats()["guard"]["alarms"] == 0
    for step in range(100, WINDOW * (1 + windows) + 1):
        results = reduced(ddp, _gradients(step, rank, [1]))
    return _off(results, step, [1]), handle.stats()["guard"]


@pytest.mark.parametrize(
    ("algorithm", "options", "levels"),
    [
        ("bytegrad", {}, 1),
        pytest.param("bytegrad", {"codec": "1bit"}, 4, marks=pytest.mark.long),
        ("quantized_allreduce", {"codec": {"*": "4bit"}}, 2),
    ],
    ids=str,
)
def test_heavy_tails_in_one_layer_are_found_in_the_next_window_and_coded_finer(
    rank_pools: Pools, algorithm: str, options: dict[str, Any], levels: int
) -> None:
    [(warned, seen), (warned_too, _)] = rank_pools[2].run(_with_tails, algorithm, options, levels)
    assert warned == warned_too
    assert seen["alarms"] >= 1
    assert seen["raised"] == {}
    for off, seen in rank_pools[2].run(_with_tails, algorithm, {**options, "guard": "adapt"}, levels):
        assert seen["raised"] == {"leaves.1": levels}
        assert off[1] < 1e-5 < 0.1 * warned[1]
        # Its groups begin elsewhere, now that it travels in a section of its own.
        assert off[0] == pytest.approx(warned[0], rel=0.05)
    for off, seen in rank_pools[2].run(_with_tails, algorithm, {**options, "guard": None}, levels):
        assert off == warned, "to warn changes nothing"
        assert seen["looks"] == seen["alarms"] == 0


def _moved(algorithm: str, tails: Sequence[int], options: dict[str, Any]) -> tuple[dict[str, Any], str, list[Tensor]]:
    """Have weights move by what they are given: figures, what was logged, and the weights."""
    ddp = DDP(Leaves(*SHAPES))
    optimizer = optimizer_for(algorithm, ddp)
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
    with captured_stderr() as said:
        for step in range(2 * WINDOW + 1):
            reduced(ddp, _gradients(step, dist.get_rank(), tails))
            optimizer.step()
        return dict(handle.stats()), said(), [parameter.detach().clone() for parameter in ddp.parameters()]


def test_heavy_tails_of_a_momentum_are_found_and_coded_finer(rank_pools: Pools) -> None:
    for guard, raised in (("warn", set()), ("adapt", {"leaves.1"})):
        for stats, _, _ in rank_pools[2].run(_moved, "qadam", [1], {**FLAT, "guard": guard}):
            assert stats["guard"]["alarms"] >= 1
            assert set(stats["guard"]["raised"]) == raised


ROUNDS: dict[str, Any] = {"codec": "4bit", "sync_every": 2, "fragments": 1, "delay": 0}


@pytest.mark.parametrize(("algorithm", "options"), [("diloco", ROUNDS), ("low_precision_decentralized", FLAT)], ids=str)
def test_heavy_tails_of_differences_are_told_and_nothing_travels_for_it(
    rank_pools: Pools, algorithm: str, options: dict[str, Any]
) -> None:
    watched = rank_pools[2].run(_moved, algorithm, [1], options)
    unwatched = rank_pools[2].run(_moved, algorithm, [1], {**options, "guard": None})
    for rank, ((seen, said, weights), (plain, nothing, others)) in enumerate(zip(watched, unwatched, strict=True)):
        assert seen["guard"]["alarms"] >= 1
        assert said.count("bagua: 'leaves.1' at step ") == said.count(" is sound") == 1 - rank
        assert same(weights, others)
        assert seen["wire_bytes"] == plain["wire_bytes"]
        assert (plain["guard"]["looks"], nothing.count("bagua: '")) == (0, 0)
    for seen, said, _ in rank_pools[2].run(_moved, algorithm, [], options):
        assert seen["guard"]["looks"] > 3
        assert (seen["guard"]["alarms"], said.count("bagua: '")) == (0, 0)
        assert 0 < seen["guard"]["coding_loss"] < 0.02


FOUR_BITS: dict[str, Any] = {"algorithm": "quantized_allreduce", "codec": {"*": "4bit"}}


def _steps(options: dict[str, Any], length: int = 3, saved: dict[str, Any] | None = None, hosts: str = "hh") -> Any:
    """Take steps, from the first or from `saved` on; the state then, what came of the gradients, and what is raised."""
    with emulated_hosts(hosts) as group:
        ddp = DDP(Leaves(*ONE), process_group=group)
        handle = bagua.register_comm_hook(ddp, **{**FLAT, "guard": "adapt", **options})
        if saved is not None:
            handle.load_state_dict(saved)
        first, rank = handle.state_dict()["step"], dist.get_rank()
        results = [reduced(ddp, _gradients(step, rank, [0], ONE))[0] for step in range(first, first + length)]
        return handle.state_dict(), results, handle.stats()["guard"]["raised"]


def _adapting(options: dict[str, Any], saved_at: int) -> tuple[list[Tensor], dict[str, int]]:
    saved, before, _ = _steps(options, saved_at)
    _, results, raised = _steps(options, 6 - saved_at, saved if saved_at else None)
    return before + results, raised


@pytest.mark.parametrize(
    "options", [{"algorithm": "bytegrad", "codec": "4bit"}, FOUR_BITS, {**FOUR_BITS, "residuals": "8bit"}], ids=str
)
def test_a_continued_run_adapts_at_the_same_step(rank_pools: Pools, options: dict[str, Any]) -> None:
    # The first two steps are looked at: what they find holds from the third on.
    runs = [rank_pools[2].run(_adapting, options, saved_at) for saved_at in (0, 1, 2, 3)]
    whole, raised = runs[0][0]
    assert raised == {"leaves.0": 1}
    for saved_at, of_ranks in enumerate(runs):
        assert same(of_ranks, [(whole, raised)] * 2), f"{saved_at=}"


def _joined_by_a_new_rank() -> tuple[list[Tensor], dict[str, int]]:
    saved = _steps(FOUR_BITS)[0]
    return _steps(FOUR_BITS, saved={**saved, "state": {}} if dist.get_rank() else saved)[1:]


def test_a_new_rank_codes_as_the_others_do(rank_pools: Pools) -> None:
    (results, raised), (others, raised_too) = rank_pools[2].run(_joined_by_a_new_rank)
    assert raised == raised_too == {"leaves.0": 1}
    assert same(results, others)


@on_ranks(2)
def test_ranks_whose_guards_go_on_from_other_levels_are_told() -> None:
    saved = _steps(FOUR_BITS, hosts="AB")[0]
    with pytest.raises(RuntimeError, match=r"levels of the guard\. Load the handle's state_dict on all ranks"):
        _steps(FOUR_BITS, hosts="AB", saved={**saved, "guard": None} if dist.get_rank() else saved)


@on_ranks(2)
def test_a_run_may_go_on_under_another_guard() -> None:
    saved = _steps({**FOUR_BITS, "guard": "warn"}, 0)[0]
    del saved["options"]["start_step"], saved["options"]["guard"]  # of a time when there was none
    went_on, _, raised = _steps(FOUR_BITS, saved=saved)
    assert raised == {"leaves.0": 1}
    with pytest.raises(ValueError, match="the checkpoint was written with options"):
        _steps({**FOUR_BITS, "codec": "1bit"}, saved=saved)
    handle = bagua.register_comm_hook(DDP(Leaves(*ONE)), **FLAT, **FOUR_BITS, guard="adapt")
    of_another_model = went_on["guard"] + torch.eye(1, went_on["guard"].shape[1], dtype=torch.long)
    with pytest.raises(ValueError, match="'guard' of the checkpoint has parameter 1, this model has 1"):
        handle.load_state_dict({**went_on, "guard": of_another_model})
    assert handle.state_dict()["state"] == {}


def _figures() -> tuple[str, list[float]]:
    """With the instructions of the processor that torch used for them."""
    figures = []
    for options in ({"algorithm": "bytegrad", **FLAT}, {"algorithm": "powersgd", "start_step": 0}):
        ddp = DDP(Leaves((256, 257)))
        handle = bagua.register_comm_hook(ddp, **options)
        for step in range(3):
            reduced(ddp, _gradients(step, dist.get_rank(), shapes=[(256, 257)]))
        figures.append(handle.stats()["guard"]["error_of_mean"])
    return torch.backends.cpu.get_cpu_capability(), figures


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="this processor has no AVX2"
)
def test_ranks_on_unlike_processors_come_to_the_same_figures() -> None:
    (one, figures), (other, others) = run_ranks(2, _figures, env={"ATEN_CPU_CAPABILITY": ["default", "avx2"]})
    assert (one, other) == ("DEFAULT", "AVX2")
    assert 0 not in figures
    assert figures == others


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 32), nn.Flatten(), nn.Linear(32 * 8, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 50)
    )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("bytegrad", {}),
        pytest.param("quantized_allreduce", {}, marks=pytest.mark.long),
        ("quantized_allreduce", {"codec": "2bit"}),
        ("quantized_allreduce", {"codec": "2bit", "rounding": "stochastic"}),
        ("qadam", {}),
        pytest.param("diloco", {**ROUNDS, "sync_every": 4, "fragments": 2, "delay": 1}, marks=pytest.mark.long),
        pytest.param("low_precision_decentralized", {}, marks=pytest.mark.long),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_training_that_its_codec_suits_is_not_disturbed(algorithm: str, options: dict[str, Any]) -> None:
    ddp = DDP(_network(), bucket_cap_mb=0.05)
    if algorithm == "qadam":
        optimizer: torch.optim.Optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=3e-3, warmup_steps=20)
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **FLAT, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3 * WINDOW):
        tokens = (torch.randint(50, (16, 1), generator=generator) + torch.arange(9)) % 50
        loss = nn.functional.cross_entropy(ddp(tokens[:, :8]), tokens[:, 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seen = handle.stats()["guard"]
    # Each of the first steps has some, but those of a warm-up are not coded, and weights have fewer buckets.
    assert seen["looks"] > (4 if algorithm in ("qadam", "low_precision_decentralized") else 10)
    assert seen["alarms"] == 0
    assert 0 < seen["coding_loss"] < 3


def _fitted(algorithm: str, options: dict[str, Any], rates: tuple[float, float]) -> tuple[float, dict[str, Any]]:
    """Fit a matrix by SGD with momentum, whose learning rate becomes another one after 40 steps; the last loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 48, generator=generator) * torch.linspace(1, 0.1, 48)
    y = torch.randn(64, 48, generator=generator) @ torch.randn(48, 48, generator=generator) / 8
    linear = nn.Linear(48, 48, bias=False)
    nn.init.zeros_(linear.weight)
    ddp = DDP(linear)
    handle = bagua.register_comm_hook(ddp, algorithm, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rates[0], momentum=0.9)
    own = slice(dist.get_rank(), None, 2)
    for step in range(160):
        optimizer.param_groups[0]["lr"] = rates[step >= 40]
        noise = torch.randn(32, 48, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())) / 10
        loss = (ddp(x[own] + noise) - y[own]).square().sum() / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float((linear(x) - y).square().mean()), handle.stats()["guard"]


@pytest.mark.parametrize(
    ("rank", "rates"), [(1, (0.02, 0.02)), (4, (0.005, 0.2))], ids=["rank 1", "a jump of the learning rate"]
)
def test_a_training_by_factors_that_diverges_is_saved(rank_pools: Pools, rank: int, rates: tuple[float, float]) -> None:
    exact = rank_pools[2].run(_fitted, "gradient_allreduce", {}, rates)[0][0]
    factors = {"rank": rank, "start_step": 0}
    lost, seen = rank_pools[2].run(_fitted, "powersgd", factors, rates)[0]
    assert not lost < 2 * exact
    assert seen["alarms"] >= 1
    for saved, seen in rank_pools[2].run(_fitted, "powersgd", {**factors, "guard": "adapt"}, rates):
        assert seen["raised"] == {"weight": 1}
        assert saved < 1.1 * exact
