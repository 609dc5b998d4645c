# SPDX-License-Identifier: Apache-2.0
"""powersgd under stock DDP, against its definition and against torch's own hook."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import here, randn
from hooked_models import Leaves, emulated_hosts, reduced, same
from powersgd_reference import Reference, matrix_shape, torch_hooks_draws
from ranks import Pools, RankPool, on_new_ranks
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

Shape = tuple[int, ...]
# Matrices of equal shapes and of others, a convolution, vectors, one too small for factors, one without elements.
SHAPES: list[Shape] = [(40, 30), (17,), (40, 30), (8, 3, 5, 5), (3, 4), (0, 7), (31, 64), (40, 30), (1, 50)]
STEPS = 6
Step = list[Tensor]


def gradients_of(rank: int, step: int, shapes: Sequence[Shape] = SHAPES, dtype: torch.dtype = torch.float32) -> Step:
    drawn = [randn(*shape, seed=1000 * step + 100 * rank + place) for place, shape in enumerate(shapes)]
    return [gradient.to(dtype) for gradient in drawn]


class Plan(NamedTuple):
    options: dict[str, Any]
    hosts: str = ""
    steps: int = STEPS
    shapes: Sequence[Shape] = SHAPES
    dtype: torch.dtype = torch.float32
    ddp_options: dict[str, Any] | None = None
    memory_format: torch.memory_format = torch.contiguous_format


def _train(plan: Plan) -> tuple[list[Step], dict[str, Tensor], dict[str, Any]]:
    with emulated_hosts(plan.hosts or "h" * dist.get_world_size()) as group:
        model = Leaves(*plan.shapes, dtype=plan.dtype, memory_format=plan.memory_format)
        ddp = DDP(model, process_group=group, **(plan.ddp_options or {}))
        handle = bagua.register_comm_hook(ddp, "powersgd", **{"start_step": 0, **plan.options})
        rank = dist.get_rank()
        history = [reduced(ddp, gradients_of(rank, step, plan.shapes, plan.dtype)) for step in range(plan.steps)]
        return history, handle.state_dict()["state"], handle.stats()


def _of_all(size: int, step: int, plan: Plan) -> list[Step]:
    return [[g.cpu() for g in gradients_of(rank, step, plan.shapes, plan.dtype)] for rank in range(size)]


def assert_close(got: Step, expected: Step, tolerance: float) -> None:
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        error = (one.double() - other.double()).norm() / other.double().norm() if other.numel() else torch.zeros(())
        assert error <= tolerance, f"parameter {place} of {tuple(one.shape)} is off by {error:.2g}"


# --- the definition ---

OPTIONS: list[dict[str, Any]] = [
    {"rank": 2, "error_feedback": False},
    {"rank": 2, "warm_start": False},
    {"rank": 8, "min_compression": 0.5, "error_feedback": False, "warm_start": False},
]


def _follow(pool: RankPool, plan: Plan, tolerance: float = 1e-5) -> None:
    results = pool.run(_train, plan)
    kept = ("rank", "error_feedback", "warm_start", "min_compression")
    reference = Reference(**{"rank": 4, **{name: plan.options[name] for name in kept if name in plan.options}})
    for step in range(plan.steps):
        expected = reference.reduced(_of_all(pool.world_size, step, plan), step)
        for history, _, _ in results:
            assert same(history[step], results[0][0][step]), f"step {step}"
        assert_close(results[0][0][step], expected, tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_the_definition(rank_pools: Pools, options: dict[str, Any]) -> None:
    _follow(rank_pools[3], Plan(options))


@pytest.mark.parametrize("hosts", ["AB", "AAB", "ABAB"])
@pytest.mark.parametrize(("codec", "tolerance"), [("", 1e-5), ("int8", 0.15), ("minmax_uint8", 0.3)])
def test_between_hosts_too(rank_pools: Pools, hosts: str, codec: str, tolerance: float) -> None:
    # With a codec: the same bits everywhere, and near. Errors of one step come back as feedback in the next.
    _follow(rank_pools[len(hosts)], Plan({"codec": codec}, hosts), tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)], ids=str
)
def test_in_every_dtype(rank_pools: Pools, dtype: torch.dtype, tolerance: float) -> None:
    _follow(rank_pools[3], Plan({"rank": 2}, dtype=dtype), tolerance)


def test_a_convolution_stored_by_channels_is_a_matrix_as_it_lies(rank_pools: Pools) -> None:
    # A step from the same Q gives another product, as its rows are other columns of M; of rank 8 it is all of M.
    shapes = [(8, 30, 5, 5)]
    plan = Plan({"rank": 8, "min_compression": 0.5}, shapes=shapes, steps=2, memory_format=torch.channels_last)
    for history, state, _ in rank_pools[2].run(_train, plan):
        assert state["q.0"].shape == (8, 750)
        for step, (gradient,) in enumerate(history):
            assert gradient.is_contiguous(memory_format=torch.channels_last)
            mean = torch.stack([own[0] for own in _of_all(2, step, plan)]).mean(0)
            assert_close([gradient], [mean], 1e-5)


# --- torch's hook ---

TORCH_STEPS = 3  # of full precision: two are needed, and a third shows that they are counted alike


class Stock(NamedTuple):
    rank: int
    use_error_feedback: bool = True
    batch_tensors_with_same_shape: bool = False


def _train_with_torchs_hook(stock: Stock, shapes: Sequence[Shape]) -> list[Step]:
    ddp = DDP(Leaves(*shapes))
    state = torch_hook.PowerSGDState(
        dist.group.WORLD,
        matrix_approximation_rank=stock.rank,
        start_powerSGD_iter=TORCH_STEPS,
        use_error_feedback=stock.use_error_feedback,
        batch_tensors_with_same_shape=stock.batch_tensors_with_same_shape,
    )
    ddp.register_comm_hook(state, torch_hook.powerSGD_hook)
    rank = dist.get_rank()
    return [reduced(ddp, gradients_of(rank, step, shapes)) for step in range(TORCH_STEPS + STEPS)]


def _train_from_its_factors(stock: Stock, shapes: Sequence[Shape]) -> list[Step]:
    ddp = DDP(Leaves(*shapes))
    handle = bagua.register_comm_hook(
        ddp, "powersgd", rank=stock.rank, start_step=TORCH_STEPS, error_feedback=stock.use_error_feedback
    )
    matrices = {}
    # In the order in which gradients become ready, which is that of DDP's bucket.
    for place in reversed(range(len(shapes))):
        shape = matrix_shape(torch.empty(shapes[place]), stock.rank)
        if shape is not None:
            matrices[place] = shape
    starts = torch_hooks_draws(list(matrices.values()), stock.rank, batched=stock.batch_tensors_with_same_shape)
    state = handle.state_dict()
    for place, start in zip(matrices, starts, strict=True):
        state["state"][f"q.{place}"] = here(start.T.contiguous())
    handle.load_state_dict(state)
    rank = dist.get_rank()
    return [reduced(ddp, gradients_of(rank, step, shapes)) for step in range(TORCH_STEPS + STEPS)]


@pytest.mark.parametrize(
    "stock",
    [Stock(1), Stock(2), Stock(4), Stock(2, use_error_feedback=False), Stock(4, batch_tensors_with_same_shape=True)],
)
def test_gradients_are_those_of_torchs_hook_that_starts_from_the_same_factors(rank_pools: Pools, stock: Stock) -> None:
    # Its view() knows no gradients without elements.
    shapes = [shape for shape in SHAPES if 0 not in shape]
    stocks = rank_pools[3].run(_train_with_torchs_hook, stock, shapes)
    ours = rank_pools[3].run(_train_from_its_factors, stock, shapes)
    for step in range(TORCH_STEPS + STEPS):
        assert_close(ours[0][step], stocks[0][step], 1e-5)


# --- buckets, checkpoints, what cannot be used ---


@pytest.mark.cpu_only("on CUDA ranks compare nothing")
@on_new_ranks(2)
def test_a_checkpoint_on_one_rank_alone_is_found_out() -> None:
    ddp = DDP(Leaves(*SHAPES))
    handle = bagua.register_comm_hook(ddp, "powersgd", start_step=2)
    if dist.get_rank() == 0:
        handle.load_state_dict({**handle.state_dict(), "step": 7})
    with pytest.raises(RuntimeError, match=r"step 1 and step 8|step 8 and step 1") as refused:
        reduced(ddp, gradients_of(dist.get_rank(), 0))
    assert "Load the handle's state_dict on all ranks" in str(refused.value)


# --- bytes ---


def test_factors_in_8_bits_take_a_quarter_of_the_bytes_and_vectors_stay_exact(rank_pools: Pools) -> None:
    shapes: list[Shape] = [(400, 300), (400, 300), (64, 32, 3, 3), (64,)]
    plan = Plan({"rank": 4, "codec": "int8", "guard": None}, hosts="ABC", shapes=shapes, steps=4)
    # Blocks of 128 numbers, each with a scale in 2 bytes.
    factors = (2 * 4 * (400 + 300) + 4 * (64 + 288)) * (1 + 2 / 128)
    expected = 2 * 2 / 3 * (factors + 4 * 64) * plan.steps
    for history, _, stats in rank_pools[3].run(_train, plan):
        assert stats["wire_bytes"] == pytest.approx(expected, rel=0.1)
        assert not any(stage.startswith("allreduce") for stage in stats["seconds"]), "vectors take no message more"
        for step, gradients in enumerate(history):
            mean = torch.stack([own[3] for own in _of_all(3, step, plan)]).mean(0)
            assert_close([gradients[3]], [mean], 1e-6)


def test_the_memory_it_says_is_that_of_two_sets_of_residuals_and_factors(rank_pools: Pools) -> None:
    for _, state, stats in rank_pools[2].run(_train, Plan({"rank": 4})):
        assert stats["seconds"].keys() >= {"multiply", "allreduce_p", "multiply_transposed", "allreduce_q", "replace"}
        assert stats["state_bytes"] == 2 * sum(t.nbytes for t in state.values() if t.is_floating_point()) > 0
