# SPDX-License-Identifier: Apache-2.0
"""local_sgd and diloco under stock DDP, step by step against a plain loop, torchft's fixtures and torch.optim.SGD."""

import contextlib
import copy
import io
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from devices import randn
from hooked_models import emulated_hosts, same
from ranks import RankPool, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

# Both sides add the ranks' values in another order, and fuse other operations.
CLOSE = 2e-6


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Plan(NamedTuple):
    """The options of diloco that a plain loop follows."""

    sync_every: int = 6
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def register(self, ddp: DDP, optimizer: torch.optim.Optimizer, **options: Any) -> bagua.Handle:
        return bagua.register_comm_hook(ddp, "diloco", optimizer=optimizer, **self._asdict(), **options)


class PlainRounds(sim.Nothing):
    """All ranks in one process: the rule as the issue writes it, with torch's own optimizer as the outer one."""

    def __init__(self, models: Sequence[nn.Module], plan: Plan, cut: Sequence[Sequence[int]]) -> None:
        self.plan, self.cut, self.steps = plan, cut, 0
        self.outer = [p.detach().clone().requires_grad_() for p in models[0].parameters()]
        momentum = {"momentum": plan.outer_momentum, "nesterov": plan.nesterov and plan.outer_momentum > 0}
        self.optimizers = [
            torch.optim.SGD([self.outer[index] for index in fragment], lr=plan.outer_lr, **momentum)  # type: ignore[arg-type]
            for fragment in cut
        ]

    def after_step(self, models: Sequence[nn.Module]) -> None:
        self.steps += 1
        interval, plan = self.plan.sync_every // self.plan.fragments, self.plan
        for fragment, indices in enumerate(self.cut):
            for index in indices:
                if (self.steps + plan.delay) % plan.sync_every == (fragment + 1) * interval % plan.sync_every:
                    locals_ = [list(model.parameters())[index].detach() for model in models]
                    if self.steps > 0:
                        self.outer[index].grad = torch.stack([self.outer[index].detach() - x for x in locals_]).mean(0)
        for fragment, indices in enumerate(self.cut):
            if self.steps % plan.sync_every == (fragment + 1) * interval % plan.sync_every:
                self.optimizers[fragment].step()
                for index, model in itertools.product(indices, models):
                    weight = list(model.parameters())[index].detach()
                    weight.copy_(self.outer[index].detach() * (1 - plan.mixing) + weight * plan.mixing)


# --- torchft's fixtures: one weight per fragment, w = 1, gradient 2, inner rate 1, outer rate 2, sync_every 6 ---

FIXTURES = {
    (0, 0.0): ((-11, -35), (-23, -47)),
    (0, 0.5): ((-11, -29), (-23, -35)),
    (0, 1.0): ((-11, -23), (-23, -23)),
    (1, 0.0): ((-7, -27), (-19, -39)),
    (1, 0.5): ((-7, -25), (-19, -31)),
    (1, 1.0): ((-7, -23), (-19, -23)),
}


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.second = nn.Parameter(torch.ones(1))

    def forward(self, factor: float) -> Tensor:
        return factor * (self.first + self.second).sum()


def _follow_fixture(delay: int, mixing: float) -> tuple[tuple[float, ...], ...]:
    ddp = DDP(TwoWeights())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    plan = Plan(6, 2, delay, mixing, outer_lr=2.0, outer_momentum=0.0)
    handle = plan.register(ddp, optimizer)
    outer: list[list[float]] = [[], []]
    for step in range(1, 13):
        optimizer.zero_grad()
        ddp(2.0).backward()
        optimizer.step()
        if step % 3 == 0:
            fragment = (step // 3 - 1) % 2
            outer[fragment].append(handle.state_dict()["state"][f"outer_weights.{fragment}"].item())
    return tuple(map(tuple, outer))


@pytest.mark.parametrize(("delay", "mixing"), FIXTURES)
def test_the_fixtures_of_torchft(rank_pools: dict[int, RankPool], delay: int, mixing: float) -> None:
    assert rank_pools[2].run(_follow_fixture, delay, mixing) == [FIXTURES[delay, mixing]] * 2


# --- against a plain loop ---


def _train(
    model: nn.Module,
    register: Callable[[DDP, torch.optim.Optimizer], bagua.Handle],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    steps: sim.Plan,
    **ddp_options: Any,
) -> tuple[list[Tensor], dict[str, Any], list[dict[str, Tensor]]]:
    ddp = DDP(copy.deepcopy(model), **ddp_options)
    optimizer = make_optimizer(ddp)
    handle = register(ddp, optimizer)
    history, states = [], []
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            if batch.synchronised:
                sim.batch_loss(ddp, batch.number, dist.get_rank()).backward()
            else:
                with ddp.no_sync():
                    sim.batch_loss(ddp, batch.number, dist.get_rank()).backward()
        optimizer.step()
        history.append(sim.flat(ddp.parameters()))
        states.append({name: value.clone() for name, value in handle.state_dict()["state"].items()})
    return history, handle.stats(), states


def three_layers() -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(23, 9), nn.Tanh(), nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 3))
    return model.to(torch.get_default_device())


CONSECUTIVE = {1: [range(6)], 2: [range(2), range(2, 6)], 3: [range(2), range(2, 4), range(4, 6)]}
PLANS = [
    Plan(),
    Plan(1, outer_lr=1.0, outer_momentum=0.0),
    Plan(outer_momentum=0.5, nesterov=False),
    Plan(6, 2),
    Plan(6, 3, delay=1, mixing=0.25),
    Plan(8, 2, delay=3, mixing=1.0),
    Plan(6, 1, delay=5, mixing=0.5, outer_lr=1.0),
]


def _follow_plan(plan: Plan, adaptive: bool) -> tuple[list[Tensor], dict[str, Any], list[dict[str, Tensor]]]:
    return _train(three_layers(), plan.register, adam if adaptive else momentum_sgd, sim.one_batch_a_step(26))


def _assert_close(histories: Sequence[list[Tensor]], expected: Sequence[Sequence[Tensor]]) -> None:
    for step, weights in enumerate(expected):
        for rank, history in enumerate(histories):
            error = (history[step] - weights[rank]).abs().max().item()
            assert error <= CLOSE, f"rank {rank} is off by {error:.2g} after step {step + 1}"
    assert (expected[-1][0] - expected[0][0]).abs().max() > 1e3 * CLOSE, "training that hardly moves shows nothing"


@pytest.mark.parametrize(
    ("size", "plan"),
    [(3, plan) for plan in PLANS] + [pytest.param(n, plan, marks=pytest.mark.long) for n in (2, 4) for plan in PLANS],
    ids=str,
)
def test_diloco_follows_a_plain_loop(rank_pools: dict[int, RankPool], size: int, plan: Plan) -> None:
    adaptive, peers = plan.fragments == 2, rank_pools[size]
    histories, stats, states = zip(*peers.run(_follow_plan, plan, adaptive), strict=True)
    models = sim.copies(three_layers(), peers.world_size)
    rounds = PlainRounds(models, plan, CONSECUTIVE[plan.fragments])
    optimizers = [(adam if adaptive else momentum_sgd)(model) for model in models]
    _assert_close(histories, sim.simulate(models, optimizers, rounds, sim.one_batch_a_step(26)))
    # The outer weights are the same bits on all ranks, at any time.
    for own in states:
        assert all(same(own[step][name], states[0][step][name]) for step in range(26) for name in own[step])
    assert {own["rounds"] for own in stats} == {26 * plan.fragments // plan.sync_every}
    assert {own["steps"] for own in stats} == {26}


@pytest.mark.parametrize("synchronised", [False, True], ids=["no_sync", "synchronised"])
def test_accumulated_gradients_make_one_step(rank_pools: dict[int, RankPool], synchronised: bool) -> None:
    steps = sim.accumulating(13, synchronised=synchronised)
    plan = Plan(4, 2, delay=1, mixing=0.5)
    results = rank_pools[2].run(_train, three_layers(), plan.register, momentum_sgd, steps)
    models = sim.copies(three_layers(), 2)
    rounds = PlainRounds(models, plan, CONSECUTIVE[2])
    expected = sim.simulate(models, [momentum_sgd(model) for model in models], rounds, steps)
    _assert_close([history for history, _, _ in results], expected)


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"static_graph": True},
        pytest.param({"find_unused_parameters": True}, marks=pytest.mark.long),
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_other_settings_of_ddp_change_nothing(rank_pools: dict[int, RankPool], ddp_options: dict[str, Any]) -> None:
    plan = Plan(4, 2, delay=1)
    steps = sim.one_batch_a_step(9)
    plain, other = (rank_pools[2].run(_train_with, plan, steps, options)[0] for options in ({}, ddp_options))
    assert same(plain, other)


def _train_with(plan: Plan, steps: sim.Plan, ddp_options: dict[str, Any]) -> list[Tensor]:
    return _train(three_layers(), plan.register, momentum_sgd, steps, **ddp_options)[0]


# --- local_sgd ---


class Average(sim.Nothing):
    def __init__(self, every: int) -> None:
        self.every, self.steps = every, 0

    def after_step(self, models: Sequence[nn.Module]) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            average = sim.mean([sim.flat(model.parameters()) for model in models])
            for model in models:
                sim.assign(list(model.parameters()), average)


def _local_sgd(every: int) -> list[Tensor]:
    def register(ddp: DDP, optimizer: torch.optim.Optimizer) -> bagua.Handle:
        return bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer, sync_every=every)

    return _train(three_layers(), register, momentum_sgd, sim.one_batch_a_step(16))[0]


@pytest.mark.parametrize("every", [1, 5])
def test_local_sgd_averages_the_weights(rank_pools: dict[int, RankPool], every: int) -> None:
    histories = rank_pools[3].run(_local_sgd, every)
    models = sim.copies(three_layers(), 3)
    expected = sim.simulate(models, [momentum_sgd(m) for m in models], Average(every), sim.one_batch_a_step(16))
    _assert_close(histories, expected)
    for step in range(16):
        alike = all(same(histories[0][step], history[step]) for history in histories[1:])
        assert alike == ((step + 1) % every == 0)


def test_a_round_of_one_step_at_rate_one_averages_the_weights(rank_pools: dict[int, RankPool]) -> None:
    averaged = rank_pools[3].run(_local_sgd, 1)
    plan = Plan(1, outer_lr=1.0, outer_momentum=0.0)
    outer = rank_pools[3].run(_train_with, plan, sim.one_batch_a_step(16), {})
    for one, other in zip(averaged[0], outer[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=CLOSE)


# --- the outer step ---

# A single element, and two that no vector unit divides.
LENGTHS = (1, 37, 40_009)


def _outer_steps(momentum: float, nesterov: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of rank 0 and each round: what the ranks had come to, and the outer weights before and after."""
    ddp = DDP(_Sum(*LENGTHS))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    locals_: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: locals_.append(sim.flat(ddp.parameters())))
    plan = Plan(1, outer_lr=0.7, outer_momentum=momentum, nesterov=nesterov)
    handle = plan.register(ddp, optimizer)
    rounds = []
    before = sim.flat(ddp.parameters())
    for step in range(4):
        optimizer.zero_grad()
        # The same on both ranks: the mean of two equal differences is exact.
        ddp(torch.Generator().manual_seed(step)).backward()
        optimizer.step()
        after = handle.state_dict()["state"]["outer_weights.0"]
        rounds.append((before, locals_[-1], after))
        before = after
    return rounds


class _Sum(nn.Module):
    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(randn(length, seed=length) for length in lengths)

    def forward(self, generator: torch.Generator) -> Tensor:
        gradients = [torch.randn(w.shape, generator=generator, device="cpu").to(w) for w in self.weights]
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


@pytest.mark.parametrize(
    ("momentum", "nesterov"),
    [(0.9, True), *(pytest.param(m, False, marks=pytest.mark.long) for m in (0.9, 0.0))],
)
def test_the_outer_step_is_that_of_torch_to_the_bit(
    rank_pools: dict[int, RankPool], momentum: float, nesterov: bool
) -> None:
    rounds = rank_pools[2].run(_outer_steps, momentum, nesterov)[0]
    weights = [part.clone().requires_grad_() for part in rounds[0][0].split(LENGTHS)]
    optimizer = torch.optim.SGD(weights, lr=0.7, momentum=momentum, nesterov=nesterov)
    for before, local, after in rounds:
        for weight, gradient in zip(weights, (before - local).split(LENGTHS), strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        assert same(sim.flat(weights), after)


def _mix(dtype: torch.dtype) -> None:
    ddp = DDP(nn.Conv2d(3, 37, 5, dtype=dtype).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    before: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: before.append(ddp.module.weight.detach().clone()))
    handle = Plan(1, mixing=0.25).register(ddp, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        (ddp(randn(2, 3, 9, 9, seed=step).to(dtype)).square().mean()).backward()
        optimizer.step()
        outer = handle.state_dict()["state"]["outer_weights.0"][: before[-1].numel()].view(before[-1].shape)
        assert same(torch.lerp(outer, before[-1].float(), 0.25).to(dtype), ddp.module.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_rank_keeps_of_its_weights_is_lerp_to_the_bit(
    rank_pools: dict[int, RankPool], dtype: torch.dtype
) -> None:
    rank_pools[2].run(_mix, dtype)


# --- checkpoints ---


Register = Callable[[DDP, torch.optim.Optimizer], bagua.Handle]


class Training(NamedTuple):
    ddp: DDP
    optimizer: torch.optim.Optimizer
    handle: bagua.Handle


def _begun_anew(ddp: DDP, optimizer: torch.optim.Optimizer, handle: bagua.Handle, register: Register) -> Training:
    """A training as a checkpoint of another has it."""
    file = io.BytesIO()
    torch.save([ddp.module.state_dict(), optimizer.state_dict(), handle.state_dict()], file)
    file.seek(0)
    weights, state, rounds = torch.load(file)
    ddp = DDP(three_layers())
    ddp.module.load_state_dict(weights)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    optimizer.load_state_dict(state)
    handle = register(ddp, optimizer)
    handle.load_state_dict(rounds)
    return Training(ddp, optimizer, handle)


def _train_on(plan: Plan, options: dict[str, Any], breaks: Sequence[int]) -> list[Tensor]:
    """The weights after every step, of a run that is saved and begun anew after the steps of `breaks`."""
    history: list[Tensor] = []
    model = three_layers()

    def begin() -> tuple[DDP, torch.optim.Optimizer, bagua.Handle]:
        ddp = DDP(copy.deepcopy(model))
        optimizer = adam(ddp)
        return ddp, optimizer, plan.register(ddp, optimizer, **options)

    ddp, optimizer, handle = begin()
    for step in range(1, 20):
        optimizer.zero_grad()
        sim.batch_loss(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        history.append(sim.flat(ddp.parameters()))
        if step in breaks:
            file = io.BytesIO()
            torch.save([ddp.module.state_dict(), optimizer.state_dict(), handle.state_dict()], file)
            file.seek(0)
            ddp, optimizer, handle = begin()
            weights, state, rounds = torch.load(file)
            ddp.module.load_state_dict(weights)
            optimizer.load_state_dict(state)
            handle.load_state_dict(rounds)
    return history


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(4), {}),
        (Plan(8, 2, delay=3, mixing=0.25), {}),
        (Plan(8, 2, delay=2), {"codec": "minmax_uint8"}),
    ],
    ids=str,
)
def test_a_checkpoint_anywhere_in_a_round_continues_to_the_bit(
    rank_pools: dict[int, RankPool], plan: Plan, options: dict[str, Any]
) -> None:
    whole = rank_pools[2].run(_train_on, plan, options, [])
    broken = rank_pools[2].run(_train_on, plan, options, [1, 6, 7, 12])
    assert same(whole, broken)


# --- differences in fewer bits ---


def _coded(options: dict[str, Any], hosts: str) -> tuple[list[Tensor], dict[str, Any], list[dict[str, Tensor]]]:
    with emulated_hosts(hosts) as group:

        def register(ddp: DDP, optimizer: torch.optim.Optimizer) -> bagua.Handle:
            return Plan(4, 2, delay=1).register(ddp, optimizer, **options)

        return _train(three_layers(), register, momentum_sgd, sim.one_batch_a_step(24), process_group=group)


@pytest.mark.parametrize("codec", bagua.available_codecs())
def test_coded_differences_keep_the_ranks_together(rank_pools: dict[int, RankPool], codec: str) -> None:
    exact = rank_pools[3].run(_coded, {}, "ABC")
    results = rank_pools[3].run(_coded, {"codec": codec}, "ABC")
    for _, stats, states in results:
        assert stats["wire_bytes"] < 0.5 * exact[0][1]["wire_bytes"]
        assert stats["memory"]["residuals"] > 0
        for number in (0, 1):
            outer = [f"outer_weights.{number}", f"outer_momentum.{number}"]
            assert all(same(states[-1][name], results[0][2][-1][name]) for name in outer)
            # The outer weights have gone where they go without a codec, but for a part of the way.
            way = exact[0][2][-1][outer[0]] - exact[0][2][0][outer[0]]
            most = 0.5 if codec == "1bit" else 0.3
            assert (states[-1][outer[0]] - exact[0][2][-1][outer[0]]).norm() < most * way.norm()


# --- ends ---


def _end(algorithm: str, options: dict[str, Any], call: str, steps: int) -> Tensor:
    ddp = DDP(three_layers())
    optimizer = momentum_sgd(ddp)
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sim.batch_loss(ddp, step, dist.get_rank())
        loss.backward()
        optimizer.step()
    getattr(handle, call)()
    weights = sim.flat(ddp.parameters())
    if call != "remove":
        getattr(handle, call)()
        assert same(weights, sim.flat(ddp.parameters())), "a second call has nothing left to do"
    return weights


ENDS: list[tuple[str, dict[str, Any], str, int]] = [
    (algorithm, options, call, steps)
    for (algorithm, options), call, steps in itertools.product(
        [
            ("diloco", {"sync_every": 6, "fragments": 2, "delay": 2, "mixing": 0.5}),
            ("diloco", {"sync_every": 5}),
            ("local_sgd", {"sync_every": 5}),
        ],
        ["synchronize", "abort", "remove"],
        # Of the first options: nothing done, on its way, just synchronised, on its way again.
        [0, 1, 2, 3, 5, 6],
    )
]
_SHORT_ENDS = [ENDS[1], ENDS[9], ENDS[16], ENDS[22], ENDS[29], ENDS[38], ENDS[46], ENDS[52]]


@pytest.mark.parametrize(
    ("algorithm", "options", "call", "steps"),
    [end if end in _SHORT_ENDS else pytest.param(*end, marks=pytest.mark.long) for end in ENDS],
    ids=str,
)
def test_ranks_end_with_the_same_weights_wherever_they_stop(
    rank_pools: dict[int, RankPool], algorithm: str, options: dict[str, Any], call: str, steps: int
) -> None:
    weights = rank_pools[3].run(_end, algorithm, options, call, steps)
    assert all(same(weights[0], own) for own in weights)


# --- hosts ---


class HostRounds(PlainRounds):
    """Gradients averaged inside a host."""

    def __init__(self, models: Sequence[nn.Module], plan: Plan, cut: Sequence[Sequence[int]], hosts: str) -> None:
        super().__init__(models, plan, cut)
        self.places = sim.participants(len(models), hosts, True)

    def after_backward(self, models: Sequence[nn.Module]) -> None:
        for ranks in self.places:
            sim.average_gradients([models[rank] for rank in ranks])


def _on_hosts(
    plan: Plan, hosts: str, codec: str | None
) -> tuple[list[Tensor], dict[str, Any], list[dict[str, Tensor]]]:
    with emulated_hosts(hosts) as group:

        def register(ddp: DDP, optimizer: torch.optim.Optimizer) -> bagua.Handle:
            return plan.register(ddp, optimizer, hierarchical=True, codec=codec)

        return _train(three_layers(), register, momentum_sgd, sim.one_batch_a_step(14), process_group=group)


@pytest.mark.parametrize("hosts", ["AABB", *(pytest.param(h, marks=pytest.mark.long) for h in ("ABCA", "AAA"))])
def test_ranks_of_a_host_are_one_participant(rank_pools: dict[int, RankPool], hosts: str) -> None:
    plan, size = Plan(6, 2, delay=1, mixing=0.5), len(hosts)
    results = rank_pools[size].run(_on_hosts, plan, hosts, None)
    models = sim.copies(three_layers(), size)
    rounds = HostRounds(models, plan, CONSECUTIVE[2], hosts)
    expected = sim.simulate(models, [momentum_sgd(model) for model in models], rounds, sim.one_batch_a_step(14))
    _assert_close([history for history, _, _ in results], expected)
    for ranks in sim.participants(size, hosts, True):
        assert all(same(results[rank][0], results[ranks[0]][0]) for rank in ranks), "at any time, the ranks of a host"
    # Of the gradients nothing leaves a host: what does is sent in rounds alone.
    between = sum(stats["wire_bytes_between_hosts"] for _, stats, _ in results)
    weights = 4 * results[0][0][0].numel()
    assert between <= 2 * 14 / 6 * 2 * (len(set(hosts)) - 1) * weights


def test_hosts_send_each_other_coded_differences(rank_pools: dict[int, RankPool]) -> None:
    plan = Plan(6, 2, delay=1)
    exact = rank_pools[4].run(_on_hosts, plan, "AABB", None)
    coded = rank_pools[4].run(_on_hosts, plan, "AABB", "minmax_uint8")
    sent = [sum(stats["wire_bytes_between_hosts"] for _, stats, _ in results) for results in (exact, coded)]
    # The headers of such short chunks take their part.
    assert sent[1] < 0.6 * sent[0]
    for (own, _, _), (wanted, _, _) in zip(coded, exact, strict=True):
        assert (own[-1] - wanted[-1]).norm() < 0.05 * (wanted[-1] - wanted[0]).norm()


# --- steps that are not taken, schedulers, buffers ---


def _scaled(zero_first: bool, overflows: Sequence[tuple[int, int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A GradScaler of each rank's own; `overflows` are (rank, step)."""
    ddp, rank = DDP(three_layers()), dist.get_rank()
    optimizer = momentum_sgd(ddp)
    handle = Plan(3, outer_lr=0.5).register(ddp, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    history = []
    for step in range(1, 12):
        if zero_first:
            optimizer.zero_grad()
        loss = sim.batch_loss(ddp, step, rank) * (float("inf") if (rank, step) in overflows else 1.0)
        if not zero_first:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(sim.flat(ddp.parameters()))
    handle.synchronize()
    assert handle.stats()["steps"] == 11
    return history, handle.state_dict()["state"]


# One in the middle of a round, one at the step of a synchronisation, two in a row, two ranks at once.
OVERFLOWS = [(1, 2), (0, 3), (1, 7), (1, 8), (0, 10), (1, 10)]


def test_a_step_that_a_rank_skips_counts(rank_pools: dict[int, RankPool]) -> None:
    results = rank_pools[2].run(_scaled, True, OVERFLOWS)
    models = sim.copies(three_layers(), 2)
    rounds = PlainRounds(models, Plan(3, outer_lr=0.5), CONSECUTIVE[1])
    optimizers = [momentum_sgd(model) for model in models]
    for step in range(1, 12):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            sim.batch_loss(model, step, rank).backward()
            if (rank, step) not in OVERFLOWS:
                optimizers[rank].step()
        rounds.after_step(models)
        for rank, (history, _) in enumerate(results):
            # A rank that has skipped the step of a synchronisation notices at its next forward.
            if (rank, step) not in OVERFLOWS:
                error = (history[step - 1] - sim.flat(models[rank].parameters())).abs().max().item()
                assert error < CLOSE, f"rank {rank} is off by {error:.2g} after step {step}"


def test_a_step_skipped_before_gradients_are_dropped_counts_too(rank_pools: dict[int, RankPool]) -> None:
    states = [state for _, state in rank_pools[2].run(_scaled, False, OVERFLOWS, timeout=30.0)]
    assert states[0]["step"] == states[1]["step"] == 11
    assert same(states[0], states[1])


# The rank whose last step is skipped, how many steps there are, and whether gradients are dropped after it. With two
# fragments in rounds of six, a delay of one: after step 8 a fragment is taken, after step 9 it is synchronised.
LAST_STEPS = [(1, 8, False), (0, 9, True), (1, 10, True), (0, 10, False)]


def _train_scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, skipped: int | None, idle: int | None, drop: bool
) -> None:
    """Step `skipped` overflows; step `idle` moves nothing, as a step that is skipped, and is taken."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in steps:
        if not drop:
            optimizer.zero_grad()
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = 0.0 if step == idle else rate
        scaler.scale(
            sim.batch_loss(model, step, dist.get_rank()) * (float("inf") if step == skipped else 1.0)
        ).backward()
        scaler.step(optimizer)
        scaler.update()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if drop:
            optimizer.zero_grad()


def _skip_last(end: str, register: Register, skips: bool) -> list[Tensor]:
    """The weights at the ends of trainings whose last step one rank skips, or takes without moving."""
    weights = []
    for skipping, steps, drop in LAST_STEPS:
        ddp = DDP(three_layers())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
        handle = register(ddp, optimizer)
        last = steps if dist.get_rank() == skipping else None
        with handle if end == "with" else contextlib.nullcontext():
            _train_scaled(ddp, optimizer, range(1, steps + 1), last if skips else None, None if skips else last, drop)
        if end == "state_dict":
            ddp, optimizer, handle = _begun_anew(ddp, optimizer, handle, register)
            _train_scaled(ddp, optimizer, range(steps + 1, 20), None, None, drop)
            handle.synchronize()
        elif end != "with":
            getattr(handle, end)()
        weights.append(sim.flat(ddp.parameters()))
    return weights


def _averaged_every_third_step(ddp: DDP, optimizer: torch.optim.Optimizer) -> bagua.Handle:
    return bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer, sync_every=3)


@pytest.mark.parametrize("end", ["synchronize", "abort", "remove", "with", "state_dict"])
@pytest.mark.parametrize(
    "register", [Plan(6, 2, delay=1, mixing=0.25).register, Plan(3).register, _averaged_every_third_step]
)
def test_a_last_step_that_a_rank_skips_counts(rank_pools: dict[int, RankPool], end: str, register: Register) -> None:
    one, other = rank_pools[2].run(_skip_last, end, register, True, timeout=60.0)
    assert same(one, other)
    assert same(one, rank_pools[2].run(_skip_last, end, register, False, timeout=60.0)[0])


def _synchronize_before_the_step(skips: bool) -> dict[str, Tensor]:
    ddp = DDP(three_layers())
    optimizer = momentum_sgd(ddp)
    handle = Plan(4).register(ddp, optimizer)
    for step in range(1, 4):
        optimizer.zero_grad()
        # One gradient that is not finite: the end takes the step for one that was skipped.
        (sim.batch_loss(ddp, step, 0) * (float("nan") if skips and step == 3 else 1.0)).backward()
        handle.synchronize()
        optimizer.step()
    state: dict[str, Tensor] = handle.state_dict()["state"]
    return state


@pytest.mark.parametrize("skips", [False, True], ids=["finite", "nan"])
def test_a_step_that_follows_a_synchronisation_counts_once(rank_pools: dict[int, RankPool], skips: bool) -> None:
    for state in rank_pools[2].run(_synchronize_before_the_step, skips):
        assert state["step"] == 3


def _accumulate(skipped: int, empty: bool, synchronised: bool) -> tuple[int, Tensor]:
    """Rank 1 skips a step, or its first micro-batch has gradients that are all zero."""
    ddp, rank = DDP(three_layers()), dist.get_rank()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    handle = Plan(4, 2, delay=1).register(ddp, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 10):
        optimizer.zero_grad()
        for number in range(3):
            is_special = rank == 1 and step == skipped and number == (0 if empty else 2)
            factor = (0.0 if empty else float("inf")) if is_special else 1.0
            with contextlib.nullcontext() if synchronised or number == 2 else ddp.no_sync():
                scaler.scale(sim.batch_loss(ddp, 10 * step + number, rank) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    handle.synchronize()
    return int(handle.state_dict()["state"]["step"]), sim.flat(ddp.parameters())


@pytest.mark.parametrize(("empty", "synchronised"), [(False, False), (False, True), (True, False), (True, True)])
def test_accumulated_gradients_are_one_step_whatever_they_are(
    rank_pools: dict[int, RankPool], empty: bool, synchronised: bool
) -> None:
    for skipped in (3, 9):
        (steps, one), (others, other) = rank_pools[2].run(_accumulate, skipped, empty, synchronised, timeout=30.0)
        assert (steps, others) == (9, 9)
        assert same(one, other)


def _with_scheduler(registered: bool) -> tuple[list[float], Tensor]:
    ddp = DDP(three_layers())
    optimizer = momentum_sgd(ddp)
    if registered:
        Plan(100).register(ddp, optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10)
    rates = []
    for step in range(9):
        optimizer.zero_grad()
        (sim.batch_loss(ddp, step, 0)).backward()
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates, sim.flat(ddp.parameters())


def test_schedulers_of_the_inner_optimizer_do_not_notice(rank_pools: dict[int, RankPool]) -> None:
    for (rates, weights), (expected, same_weights) in zip(
        rank_pools[2].run(_with_scheduler, True), rank_pools[2].run(_with_scheduler, False), strict=True
    ):
        assert rates == expected
        # Both ranks train on the same data.
        torch.testing.assert_close(weights, same_weights, rtol=0, atol=CLOSE)


def _with_buffers(average: bool) -> list[tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(23, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(torch.get_default_device())
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = bagua.register_comm_hook(
        ddp, "diloco", optimizer=optimizer, sync_every=4, fragments=2, average_buffers=average
    )
    seen = []
    for step in range(1, 9):
        optimizer.zero_grad()
        sim.batch_loss(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        assert isinstance(model[1], nn.BatchNorm1d)
        assert model[1].running_mean is not None
        seen.append((model[1].running_mean.clone(), sim.flat(model[0].parameters())))
    handle.synchronize()
    seen.append((model[1].running_mean.clone(), sim.flat(model[0].parameters())))
    return seen


@pytest.mark.parametrize("average", [False, True], ids=["own", "averaged"])
def test_buffers_are_averaged_where_asked_for(rank_pools: dict[int, RankPool], average: bool) -> None:
    one, other = rank_pools[2].run(_with_buffers, average)
    for step in range(8):
        assert torch.equal(one[step][0], other[step][0]) == (average and (step + 1) % 4 == 0), step + 1
    assert torch.equal(one[8][0], other[8][0]), "synchronize()"


# --- ranks that do not keep step ---


def _with_uneven_steps(end: str, ahead: int) -> str:
    ddp = DDP(three_layers())
    optimizer = momentum_sgd(ddp)
    handle = bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer, sync_every=3)
    try:
        for step in range(5 + (ahead if dist.get_rank() == 1 else 0)):
            optimizer.zero_grad()
            sim.batch_loss(ddp, step, dist.get_rank()).backward()
            optimizer.step()
        getattr(handle, end)()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("end", [pytest.param("synchronize", marks=pytest.mark.long), "abort", "remove"])
def test_ranks_that_end_after_other_steps_are_told_both(rank_pools: dict[int, RankPool], end: str) -> None:
    # Rank 1 is one step short of a round when both end.
    for message in rank_pools[2].run(_with_uneven_steps, end, -1, timeout=30.0):
        assert message.startswith("ValueError"), message
        assert "rank 1" in message
        assert "after step 4 against" in message
        assert "after step 5" in message


@pytest.mark.parametrize(
    "end", ["synchronize", *(pytest.param(e, marks=pytest.mark.long) for e in ("remove", "abort"))]
)
def test_a_rank_in_a_round_that_the_others_have_not_reached_is_told(end: str) -> None:
    # Rank 1 is in the round of step 6 when rank 0 ends after step 5.
    for message in run_ranks(2, _with_uneven_steps, end, 1, timeout=30.0):
        assert "the ranks do not make the same call" in message, message
        assert "bagua:average_fragment" in message
        assert "rank 0" in message
        assert "rank 1" in message


def _stay_away() -> str:
    if dist.get_rank() == 0:
        return _with_uneven_steps("synchronize", 0)
    ddp = DDP(three_layers())
    optimizer = momentum_sgd(ddp)
    bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer, sync_every=3)
    for step in range(2):
        optimizer.zero_grad()
        sim.batch_loss(ddp, step, 1).backward()
        optimizer.step()
    time.sleep(6)
    return ""


def test_a_rank_that_stays_away_is_named_at_the_timeout() -> None:
    message = run_ranks(2, _stay_away, group_timeout=3.0, timeout=40.0)[0]
    assert "Not there: rank 1 (has nothing under way" in message, message
    assert "bagua:average_fragment" in message


# --- what DDP does, what is held ---


def _gradients_stay() -> dict[str, Any]:
    ddp = DDP(three_layers(), bucket_cap_mb=0.0001)
    optimizer = adam(ddp)
    handle = bagua.register_comm_hook(ddp, "diloco", optimizer=optimizer, sync_every=4, fragments=2, delay=1)
    for step in range(6):
        optimizer.zero_grad()
        sim.batch_loss(ddp, step, dist.get_rank()).backward()
        assert ddp.require_backward_grad_sync
        optimizer.step()
    with pytest.raises(RuntimeError, match="has not seen the forward"):
        ddp.forward(torch.zeros(1, 23)).sum().backward()
    return handle.stats()


def test_ddp_fills_no_buckets_and_memory_is_told(rank_pools: dict[int, RankPool]) -> None:
    weights = 4 * sum(p.numel() for p in three_layers().parameters())
    for stats in rank_pools[2].run(_gradients_stay):
        assert (stats["steps"], stats["buckets"]) == (6, 0)
        memory = stats["memory"]
        assert memory["outer_weights"] + memory["outer_momentum"] == 2 * weights
        assert weights / 2 <= memory["largest_fragment"] < weights
        assert memory["residuals"] == 0


def _memory_of_local_sgd() -> dict[str, int]:
    ddp = DDP(three_layers())
    optimizer = momentum_sgd(ddp)
    handle = bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer, sync_every=2)
    sim.batch_loss(ddp, 0, 0).backward()
    optimizer.step()
    memory: dict[str, int] = handle.stats()["memory"]
    return memory


def test_local_sgd_tells_what_a_round_holds(rank_pools: dict[int, RankPool]) -> None:
    weights = 4 * sum(p.numel() for p in three_layers().parameters())
    for memory in rank_pools[2].run(_memory_of_local_sgd):
        assert memory["largest_fragment"] == weights
