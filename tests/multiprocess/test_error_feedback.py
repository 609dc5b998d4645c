# SPDX-License-Identifier: Apache-2.0
"""What the optimizer saw and what residuals hold is what went in, whichever way a step ends."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, reduced, same
from ranks import Pools, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Several buckets, with what each algorithm codes and what it leaves exact.
SHAPES = [(60, 70), (33,), (128, 40), (37, 53)]
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.02}
QUANTIZED: dict[str, Any] = {"algorithm": "quantized_allreduce", "hierarchical": False, "error_feedback": True}
ALGORITHMS: list[dict[str, Any]] = [
    {**QUANTIZED, "codec": "4bit"},
    {**QUANTIZED, "codec": "1bit"},
    {**QUANTIZED, "codec": "4bit", "residuals": "8bit"},
    {"algorithm": "powersgd", "rank": 2, "start_step": 0},
    {"algorithm": "powersgd", "rank": 2, "start_step": 0, "codec": "minmax_uint8"},
]
Given = list[Tensor | None]
Totals = list[Tensor]


def gradients_of(step: int, rank: int) -> Given:
    generator = torch.Generator().manual_seed(977 * step + 31 * rank + 5)
    return [torch.randn(shape, generator=generator) * (1 + i) + 0.2 for i, shape in enumerate(SHAPES)]


def _hooked(options: dict[str, Any], **ddp_options: Any) -> tuple[DDP, bagua.Handle]:
    ddp = DDP(Leaves(*SHAPES), **{**SMALL_BUCKETS, **ddp_options})
    return ddp, bagua.register_comm_hook(ddp, **options)


def _mean(given: Sequence[Given], i: int) -> Tensor:
    zero = torch.zeros(SHAPES[i]).double()
    return sum((g[i].double() for g in given if g[i] is not None), zero) / len(given)  # type: ignore[union-attr]


def _owed(state: dict[str, Tensor], average: bool = True) -> Totals:
    """What the residuals of all ranks will still add to the results, by parameter."""
    totals = []
    for i, shape in enumerate(SHAPES):
        owed = torch.zeros(shape).double().flatten()
        for name, values in state.items():
            kind, *_, position = name.split(".")
            if position != str(i) or kind == "q":
                continue
            pieces = state.get(f"{name}.pieces", torch.tensor([[0, owed.numel()]])).tolist()
            begin = 0
            for first, last in pieces:
                share = dist.get_world_size() if average and kind != "owner" else 1
                owed[first:last] += values.flatten()[begin : begin + last - first].double() / share
                begin += last - first
        dist.all_reduce(owed)
        totals.append(owed.view(shape))
    return totals


class Account:
    """What the optimizer has seen and what went in, by parameter."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.is_small = options.get("residuals") == "8bit"
        self.average = options.get("average", True)
        self.seen, self.true = ([torch.zeros(shape).double() for shape in SHAPES] for _ in range(2))

    def note(self, model: nn.Module, *given: Sequence[Given]) -> None:
        """A step of the optimizer, with the gradients of all ranks in each of its backwards."""
        self.see(model)
        for of_ranks in given:
            self.add(of_ranks)

    def see(self, model: nn.Module) -> None:
        for seen, parameter in zip(self.seen, model.parameters(), strict=True):
            if parameter.grad is not None:
                seen += parameter.grad.double()

    def add(self, of_ranks: Sequence[Given]) -> None:
        for i, true in enumerate(self.true):
            true += _mean(of_ranks, i) * (1 if self.average else len(of_ranks))

    def check(self, state: dict[str, Tensor], scale: float = 1) -> None:
        for i, owed in enumerate(_owed(state, self.average)):
            # Small residuals owe five times themselves, but for the rounding to 8 bits in each step.
            left = self.seen[i] + (5 if self.is_small else 1) * owed / scale - self.true[i]
            off = left.norm() / self.true[i].norm()
            assert off < (1e-2 if self.is_small else 3e-6), f"parameter {i}: {off:.2g} of the sum is lost"


# --- parameters that are not used ---


def _given_in(step: int) -> list[Given]:
    """Of all ranks. In some steps a parameter is used by nobody, by one rank only, or has a gradient of zeros."""
    given = [gradients_of(step, rank) for rank in range(dist.get_world_size())]
    for of_rank in given:
        if step % 3 == 1:
            of_rank[2] = None
        if step % 4 == 3:
            of_rank[3] = torch.zeros(SHAPES[3])
    if step % 3 == 2:
        given[0][0] = None
    return given


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        *ALGORITHMS,
        {**QUANTIZED, "codec": "int8", "average": False},
        pytest.param({**QUANTIZED, "codec": "minmax_uint8"}, marks=pytest.mark.long),
    ],
    ids=str,
)
@on_ranks(3)
def test_what_is_owed_to_a_parameter_that_no_rank_used_stays_owed(options: dict[str, Any], is_view: bool) -> None:
    ddp, handle = _hooked(options, find_unused_parameters=True, gradient_as_bucket_view=is_view)
    account = Account(options)
    for step in range(36):
        given = _given_in(step)
        ddp.zero_grad(set_to_none=not is_view)
        before = handle.state_dict()["state"]
        ddp(given[dist.get_rank()]).backward()
        account.note(ddp, given)
        after = handle.state_dict()["state"]
        if step % 3 == 1 and options.get("residuals") != "8bit":
            untouched = [name for name in before if name.endswith((".2", ".2.pieces"))]
            assert untouched, before.keys()
            assert all(torch.equal(before[name], after[name]) for name in untouched)
        if step % 4 == 3 and step > 4:
            # A gradient of zeros is one: what is owed goes out with it.
            assert any(not torch.equal(before[name], after[name]) for name in before if name.endswith(".3"))
    account.check(handle.state_dict()["state"])


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("options", [ALGORITHMS[1], ALGORITHMS[3]], ids=str)
@on_ranks(2)
def test_so_it_is_where_a_step_has_several_backwards(options: dict[str, Any], is_stale: bool) -> None:
    """Parameter 2 is used in the first backward of a step only: under no_sync(), or of a step that goes on."""
    ddp, handle = _hooked(options, find_unused_parameters=True)
    account = Account(options)
    for step in range(18):
        first, second = ([gradients_of(2 * step + k, r) for r in range(dist.get_world_size())] for k in (0, 1))
        for of_rank in second:
            of_rank[2] = None
        ddp.zero_grad()
        if is_stale:
            ddp(first[dist.get_rank()]).backward()
        else:
            with ddp.no_sync():
                ddp(first[dist.get_rank()]).backward()
        ddp(second[dist.get_rank()]).backward()
        account.note(ddp, first, second)
    account.check(handle.state_dict()["state"])


# In one bucket with others, a parameter that is taken for a used one gets a share of their errors.
@pytest.mark.parametrize("ddp_options", [{}, {"bucket_cap_mb": 25}], ids=["several_buckets", "one_bucket"])
@pytest.mark.parametrize("options", [ALGORITHMS[1], ALGORITHMS[3]], ids=str)
@on_ranks(2)
def test_nothing_is_owed_to_a_parameter_that_a_static_graph_never_uses(
    options: dict[str, Any], ddp_options: dict[str, Any]
) -> None:
    ddp, handle = _hooked(options, static_graph=True, **ddp_options)
    account = Account(options)
    for step in range(12):
        given = [gradients_of(step, rank) for rank in range(dist.get_world_size())]
        for of_rank in given:
            of_rank[2] = None
        reduced(ddp, given[dist.get_rank()])
        account.note(ddp, given)
    state = handle.state_dict()["state"]
    assert not _owed(state)[2].any()
    account.true[2] += 1
    account.seen[2] += 1
    account.check(state)


@on_ranks(2)
def test_the_two_argument_form_gives_the_same_gradients() -> None:
    with_model, without = (DDP(Leaves(*SHAPES), **SMALL_BUCKETS, find_unused_parameters=True) for _ in range(2))
    # Draws nothing at random, for which the place of a parameter in the model would count.
    bagua.register_comm_hook(with_model, **ALGORITHMS[0])
    without.register_comm_hook(*bagua.comm_hook(**ALGORITHMS[0]))
    for step in range(8):
        for ddp in (with_model, without):
            reduced(ddp, _given_in(step)[dist.get_rank()])
        assert same([p.grad for p in with_model.parameters()], [p.grad for p in without.parameters()])


# --- steps that are lost ---


class Embedded(nn.Module):
    """Has a sparse gradient besides."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Leaves(*SHAPES)
        self.embedding = nn.Embedding(50, 8, sparse=True)

    def forward(self, gradients: Given, factor: float) -> Tensor:
        result: Tensor = self.dense(gradients) + self.embedding(torch.arange(5)).sum() * factor
        return result


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("options", ALGORITHMS, ids=str)
@on_ranks(3)
def test_a_step_that_is_lost_leaves_no_trace_in_any_bucket(options: dict[str, Any], is_sparse: bool) -> None:
    ddp = DDP(Embedded() if is_sparse else Leaves(*SHAPES), **SMALL_BUCKETS)
    handle = bagua.register_comm_hook(ddp, **options)
    dense = ddp.module.dense if is_sparse else ddp.module
    account = Account(options)
    for step in range(24):
        given = [gradients_of(step, rank) for rank in range(dist.get_world_size())]
        is_lost = step in (8, 9, 15)
        own = given[dist.get_rank()]
        if is_lost and dist.get_rank() == 1 and not is_sparse:
            # Of a vector, which travels as it is.
            assert own[1] is not None
            own[1][3] = float("nan") if step < 15 else float("inf")
        factor = float("nan") if is_lost and dist.get_rank() == 0 else 1.0
        ddp.zero_grad()
        before = handle.state_dict()["state"]
        (ddp(own, factor) if is_sparse else ddp(own)).backward()
        if is_lost:
            after = handle.state_dict()["state"]
            assert before.keys() == after.keys()
            assert [name for name in before if not torch.equal(before[name], after[name])] == []
            continue
        account.note(dense, given)
    account.check(handle.state_dict()["state"])


# --- loss scales ---


@pytest.mark.parametrize("options", ALGORITHMS, ids=str)
@on_ranks(3)
def test_what_is_owed_changes_its_scale_with_the_loss(options: dict[str, Any]) -> None:
    ddp, handle = _hooked(options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    handle.follow(scaler)
    handle.follow(scaler)
    account = Account(options)

    optimizer.register_step_pre_hook(lambda *_: account.see(ddp))
    scales = []
    for step in range(60):
        given = [gradients_of(step, rank) for rank in range(dist.get_world_size())]
        is_lost = step in (10, 11, 25, 40)
        own = list(given[dist.get_rank()])
        if is_lost and dist.get_rank() == 1:
            own[3] = torch.full(SHAPES[3], float("inf"))
        optimizer.zero_grad()
        scaler.scale(ddp(own)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if not is_lost:
            account.add(given)
    changes = [after / before for before, after in zip([1024.0, *scales], scales, strict=False)]
    assert changes.count(0.5) == 4
    assert changes.count(2.0) > 4
    account.check(handle.state_dict()["state"], scaler.get_scale())


@on_ranks(2)
def test_a_wrapper_whose_scaler_cannot_be_followed_is_refused_before_the_model_has_a_hook() -> None:
    ddp = DDP(Leaves(*SHAPES))
    wrapper: Any = SimpleNamespace(optimizer=torch.optim.SGD(ddp.parameters(), lr=0.0), scaler=0.5)
    with pytest.raises(TypeError, match=r"expected a torch.amp.GradScaler, got float"):
        bagua.register_comm_hook(ddp, optimizer=wrapper, codec="4bit", **QUANTIZED)
    bagua.register_comm_hook(ddp, codec="4bit", **QUANTIZED)


@pytest.mark.parametrize("options", ALGORITHMS, ids=str)
@on_ranks(2)
def test_rescale_multiplies_residuals_and_nothing_else(options: dict[str, Any]) -> None:
    ddp, handle = _hooked(options)
    for step in range(4):
        reduced(ddp, gradients_of(step, dist.get_rank()))
    before = handle.state_dict()["state"]
    handle.rescale(0.25)
    after = handle.state_dict()["state"]
    for name, values in before.items():
        is_residual = name.startswith(("sender", "owner", "residual")) and not name.endswith("pieces")
        assert torch.equal(values * 0.25 if is_residual else values, after[name]), name
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="takes a factor above 0"):
            handle.rescale(factor)
    # Those of a checkpoint, before a bucket has come by.
    _, other = _hooked(options)
    other.load_state_dict(handle.state_dict())
    other.rescale(4)
    assert same(before, other.state_dict()["state"])


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@on_ranks(2)
def test_an_algorithm_without_residuals_says_that_it_needs_none(algorithm: str) -> None:
    _, handle = _hooked({"algorithm": algorithm})
    scaler = torch.amp.GradScaler("cpu")
    calls: list[Callable[[], None]] = [lambda: handle.rescale(0.5), lambda: handle.follow(scaler)]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"'{algorithm}' remembers no gradients"):
            call()
    with pytest.raises(TypeError, match=r"expected a torch\.amp\.GradScaler, got str"):
        handle.follow("scaler")  # type: ignore[arg-type]


# --- checkpoints ---


def continued(options: dict[str, Any], saved_at: int, ddp_options: dict[str, Any]) -> bool:
    """Whether a run that is continued has the bits of one that is not broken; the identity holds in any case."""

    def train(break_at: int) -> Totals:
        ddp, handle = _hooked(options, **ddp_options)
        account = Account(options)
        results: list[Tensor] = []
        for step in range(8):
            if step == break_at:
                saved = handle.state_dict()
                ddp, handle = _hooked(options, **ddp_options)
                handle.load_state_dict(saved)
            given = [gradients_of(step, rank) for rank in range(dist.get_world_size())]
            results += reduced(ddp, given[dist.get_rank()])
            account.note(ddp, given)
        account.check(handle.state_dict()["state"])
        return results

    return same(train(-1), train(saved_at))


@pytest.mark.parametrize(
    ("saved_at", "ddp_options", "has_same_bits"),
    # Before the second step only DDP knows how it will group the gradients from there on; with unused parameters it
    # never groups them anew.
    [(1, {}, False), (2, {}, True), (1, {"find_unused_parameters": True}, True)],
    ids=str,
)
@on_ranks(2)
def test_a_checkpoint_of_the_first_step_loses_nothing_and_later_ones_have_all_bits(
    saved_at: int, ddp_options: dict[str, Any], has_same_bits: bool
) -> None:
    assert continued({**QUANTIZED, "codec": "2bit"}, saved_at, ddp_options) == has_same_bits


def _state_after_more_steps(first: int, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """After nine steps with what the residuals of other ranks hold, which counts as having gone in."""
    options = {**QUANTIZED, "codec": "2bit"}
    ddp, handle = _hooked(options)
    size, rank = dist.get_world_size(), dist.get_rank()
    if saved:
        # A new rank has the buckets and steps of the others, and no residuals.
        handle.load_state_dict(saved[rank] if rank < len(saved) else {**saved[0], "state": {}})
    account = Account(options)
    held_before = _owed(handle.state_dict()["state"])
    assert held_before[0].any() == bool(saved)
    for true, owed in zip(account.true, held_before, strict=True):
        true += owed
    for step in range(first, first + 9):
        given = [gradients_of(step, each) for each in range(size)]
        reduced(ddp, given[rank])
        account.note(ddp, given)
    state = handle.state_dict()
    account.check(state["state"])
    # In memory there are those of the step before, too.
    held = sum(values.nbytes for values in state["state"].values() if values.is_floating_point())
    assert handle.stats()["state_bytes"] >= 2 * held > 0
    return state


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_on_another_number_of_ranks_what_their_residuals_hold_is_still_owed(
    rank_pools: Pools, before: int, after: int
) -> None:
    rank_pools[after].run(_state_after_more_steps, 9, rank_pools[before].run(_state_after_more_steps, 0, []))
