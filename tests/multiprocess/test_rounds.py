# SPDX-License-Identifier: Apache-2.0
"""local_sgd and diloco under stock DDP, step by step against a plain loop, torchft's fixtures and torch.optim.SGD."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from devices import randn
from hooked_models import emulated_hosts, same
from ranks import Pools, on_ranks
from rounds_training import (
    PLANS,
    PlainRounds,
    Plan,
    adam,
    assert_close,
    averaged_every,
    begun,
    momentum_sgd,
    simulated,
    three_layers,
    train,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

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


@pytest.mark.parametrize(("delay", "mixing"), FIXTURES)
@on_ranks(2)
def test_the_fixtures_of_torchft(delay: int, mixing: float) -> None:
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
    assert tuple(map(tuple, outer)) == FIXTURES[delay, mixing]


# --- against a plain loop ---


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_diloco_follows_a_plain_loop(rank_pools: Pools, plan: Plan) -> None:
    make_optimizer, steps = adam if plan.fragments == 2 else momentum_sgd, sim.one_batch_a_step(18)
    histories, stats, states = zip(*rank_pools[3].run(train, plan.register, make_optimizer, steps), strict=True)
    assert_close(histories, simulated(partial(PlainRounds, plan=plan), 3, steps, make_optimizer))
    # The outer weights are the same bits on all ranks, at any time.
    for own in states:
        assert all(same(own[step][name], states[0][step][name]) for step in range(18) for name in own[step])
    assert {own["rounds"] for own in stats} == {18 * plan.fragments // plan.sync_every}
    assert {own["steps"] for own in stats} == {18}


@pytest.mark.parametrize("synchronised", [False, True], ids=["no_sync", "synchronised"])
def test_accumulated_gradients_make_one_step(rank_pools: Pools, synchronised: bool) -> None:
    steps = sim.accumulating(13, synchronised=synchronised)
    plan = Plan(4, 2, delay=1, mixing=0.5)
    results = rank_pools[2].run(train, plan.register, momentum_sgd, steps)
    assert_close([history for history, _, _ in results], simulated(partial(PlainRounds, plan=plan), 2, steps))


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"static_graph": True},
        pytest.param({"find_unused_parameters": True}, marks=pytest.mark.long),
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_other_settings_of_ddp_change_nothing(rank_pools: Pools, ddp_options: dict[str, Any]) -> None:
    plan = Plan(4, 2, delay=1)
    steps = sim.one_batch_a_step(9)
    plain, other = (rank_pools[2].run(_train_with, plan, steps, options)[0] for options in ({}, ddp_options))
    assert same(plain, other)


def _train_with(plan: Plan, steps: sim.Plan, ddp_options: dict[str, Any]) -> list[Tensor]:
    return train(plan.register, momentum_sgd, steps, **ddp_options)[0]


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


def test_local_sgd_averages_the_weights(rank_pools: Pools) -> None:
    every, steps = 5, sim.one_batch_a_step(16)
    histories = [history for history, _, _ in rank_pools[3].run(train, averaged_every(every), momentum_sgd, steps)]
    assert_close(histories, simulated(lambda _: Average(every), 3, steps))
    for step in range(16):
        alike = all(same(histories[0][step], history[step]) for history in histories[1:])
        assert alike == ((step + 1) % every == 0)


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


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_the_outer_step_is_that_of_torch_to_the_bit(rank_pools: Pools, momentum: float, nesterov: bool) -> None:
    rounds = rank_pools[2].run(_outer_steps, momentum, nesterov)[0]
    weights = [part.clone().requires_grad_() for part in rounds[0][0].split(LENGTHS)]
    optimizer = torch.optim.SGD(weights, lr=0.7, momentum=momentum, nesterov=nesterov)
    for before, local, after in rounds:
        for weight, gradient in zip(weights, (before - local).split(LENGTHS), strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        assert same(sim.flat(weights), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_what_a_rank_keeps_of_its_weights_is_lerp_to_the_bit(dtype: torch.dtype) -> None:
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


# --- differences in fewer bits ---


def _between_hosts(
    plan: Plan, hosts: str, steps: int, options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any], list[dict[str, Tensor]]]:
    with emulated_hosts(hosts) as group:
        register = partial(plan.register, **options)
        return train(register, momentum_sgd, sim.one_batch_a_step(steps), process_group=group)


def test_coded_differences_keep_the_ranks_together(rank_pools: Pools) -> None:
    plan, hosts, steps = Plan(4, 2, delay=1), "ABC", 24
    exact = rank_pools[3].run(_between_hosts, plan, hosts, steps, {})
    for codec in bagua.available_codecs():
        results = rank_pools[3].run(_between_hosts, plan, hosts, steps, {"codec": codec})
        for _, stats, states in results:
            assert stats["wire_bytes"] < 0.5 * exact[0][1]["wire_bytes"], codec
            assert stats["memory"]["residuals"] > 0, codec
            for number in (0, 1):
                outer = [f"outer_weights.{number}", f"outer_momentum.{number}"]
                assert all(same(states[-1][name], results[0][2][-1][name]) for name in outer), codec
                # The outer weights have gone where they go without a codec, but for a part of the way.
                way = exact[0][2][-1][outer[0]] - exact[0][2][0][outer[0]]
                most = 0.5 if codec == "1bit" else 0.3
                assert (states[-1][outer[0]] - exact[0][2][-1][outer[0]]).norm() < most * way.norm(), codec


# --- hosts ---


class HostRounds(PlainRounds):
    """Gradients averaged inside a host."""

    def __init__(self, models: Sequence[nn.Module], plan: Plan, hosts: str) -> None:
        super().__init__(models, plan)
        self.places = sim.participants(len(models), hosts, True)

    def after_backward(self, models: Sequence[nn.Module]) -> None:
        for ranks in self.places:
            sim.average_gradients([models[rank] for rank in ranks])


@pytest.mark.parametrize("hosts", ["AABB", *(pytest.param(h, marks=pytest.mark.long) for h in ("ABCA", "AAA"))])
def test_ranks_of_a_host_are_one_participant(rank_pools: Pools, hosts: str) -> None:
    plan, size = Plan(6, 2, delay=1, mixing=0.5), len(hosts)
    results = rank_pools[size].run(_between_hosts, plan, hosts, 14, {"hierarchical": True})
    expected = simulated(partial(HostRounds, plan=plan, hosts=hosts), size, sim.one_batch_a_step(14))
    assert_close([history for history, _, _ in results], expected)
    for ranks in sim.participants(size, hosts, True):
        assert all(same(results[rank][0], results[ranks[0]][0]) for rank in ranks), "at any time, the ranks of a host"
    # Of the gradients nothing leaves a host: what does is sent in rounds alone.
    between = sum(stats["wire_bytes_between_hosts"] for _, stats, _ in results)
    weights = 4 * results[0][0][0].numel()
    assert between <= 2 * 14 / 6 * 2 * (len(set(hosts)) - 1) * weights


def test_hosts_send_each_other_coded_differences(rank_pools: Pools) -> None:
    plan = Plan(6, 2, delay=1)
    exact, coded = (
        rank_pools[4].run(_between_hosts, plan, "AABB", 14, {"hierarchical": True, "codec": codec})
        for codec in (None, "minmax_uint8")
    )
    sent = [sum(stats["wire_bytes_between_hosts"] for _, stats, _ in results) for results in (exact, coded)]
    # The headers of such short chunks take their part.
    assert sent[1] < 0.6 * sent[0]
    for (own, _, _), (wanted, _, _) in zip(coded, exact, strict=True):
        assert (own[-1] - wanted[-1]).norm() < 0.05 * (wanted[-1] - wanted[0]).norm()


def _with_buffers(options: dict[str, Any]) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(23, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(torch.get_default_device())
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = bagua.register_comm_hook(ddp, optimizer=optimizer, sync_every=4, **options)
    seen = []
    for step in range(1, 9):
        optimizer.zero_grad()
        sim.batch_loss(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        assert isinstance(model[1], nn.BatchNorm1d)
        assert model[1].running_mean is not None
        seen.append(model[1].running_mean.clone())
    handle.synchronize()
    seen.append(model[1].running_mean.clone())
    return seen


_TWO_FRAGMENTS: dict[str, Any] = {"algorithm": "diloco", "fragments": 2, "delay": 0}


@pytest.mark.parametrize(
    "options",
    [
        _TWO_FRAGMENTS,
        {**_TWO_FRAGMENTS, "average_buffers": True},
        {"algorithm": "local_sgd", "average_buffers": True},
    ],
    ids=str,
)
def test_buffers_are_averaged_where_asked_for(rank_pools: Pools, options: dict[str, Any]) -> None:
    one, other = rank_pools[2].run(_with_buffers, options)
    for step in range(8):
        averaged = "average_buffers" in options and (step + 1) % 4 == 0
        assert torch.equal(one[step], other[step]) == averaged, step + 1
    assert torch.equal(one[8], other[8]), "synchronize()"


# --- what DDP does, what is held ---


def _gradients_stay() -> dict[str, Any]:
    training = begun(Plan(4, 2, delay=1).register, adam, bucket_cap_mb=0.0001)
    for number in range(6):
        training.optimizer.zero_grad()
        sim.batch_loss(training.ddp, number, dist.get_rank()).backward()
        assert training.ddp.require_backward_grad_sync
        training.optimizer.step()
    with pytest.raises(RuntimeError, match="has not seen the forward"):
        training.ddp.forward(torch.zeros(1, 23)).sum().backward()
    return training.handle.stats()


def test_ddp_fills_no_buckets_and_memory_is_told(rank_pools: Pools) -> None:
    weights = 4 * sum(p.numel() for p in three_layers().parameters())
    for stats in rank_pools[2].run(_gradients_stay):
        assert (stats["steps"], stats["buckets"]) == (6, 0)
        memory = stats["memory"]
        assert memory["outer_weights"] + memory["outer_momentum"] == 2 * weights
        assert weights / 2 <= memory["largest_fragment"] < weights
        assert memory["residuals"] == 0


@on_ranks(2)
def test_local_sgd_tells_what_a_round_holds() -> None:
    training = begun(averaged_every(2))
    training.step(0)
    weights = 4 * sum(p.numel() for p in three_layers().parameters())
    assert training.handle.stats()["memory"]["largest_fragment"] == weights
