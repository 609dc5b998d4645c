# SPDX-License-Identifier: Apache-2.0
"""local_sgd and diloco: steps that are not taken, accumulated gradients, schedulers."""

import contextlib
from collections.abc import Sequence

import pytest
import simulations as sim
import torch
import torch.distributed as dist
from hooked_models import same
from ranks import Pools, on_ranks
from rounds_training import (
    CLOSE,
    PlainRounds,
    Plan,
    Register,
    Training,
    averaged_every,
    begun,
    begun_anew,
    momentum_sgd,
    three_layers,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device


def _scaled(zero_first: bool, overflows: Sequence[tuple[int, int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A GradScaler of each rank's own; `overflows` are (rank, step)."""
    rank = dist.get_rank()
    ddp, optimizer, handle = begun(Plan(3, outer_lr=0.5).register)
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


def test_a_step_that_a_rank_skips_counts(rank_pools: Pools) -> None:
    results = rank_pools[2].run(_scaled, True, OVERFLOWS)
    models = sim.copies(three_layers(), 2)
    rounds = PlainRounds(models, Plan(3, outer_lr=0.5))
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


def test_a_step_skipped_before_gradients_are_dropped_counts_too(rank_pools: Pools) -> None:
    states = [state for _, state in rank_pools[2].run(_scaled, False, OVERFLOWS, timeout=30.0)]
    assert states[0]["step"] == states[1]["step"] == 11
    assert same(states[0], states[1])


# The rank whose last step is skipped, how many steps there are, and whether gradients are dropped after it. With two
# fragments in rounds of six, a delay of one: after step 8 a fragment is taken, after step 9 it is synchronised.
LAST_STEPS = [(1, 8, False), (0, 9, True), (1, 10, True), (0, 10, False)]


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def _train_scaled(training: Training, steps: range, skipped: int | None, idle: int | None, drop: bool) -> None:
    """Step `skipped` overflows; step `idle` moves nothing, as a step that is skipped, and is taken."""
    model, optimizer, _ = training
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
        training = begun(register, _plain_sgd)
        last = steps if dist.get_rank() == skipping else None
        with training.handle if end == "with" else contextlib.nullcontext():
            _train_scaled(training, range(1, steps + 1), last if skips else None, None if skips else last, drop)
        if end == "state_dict":
            training = begun_anew(training, lambda: begun(register, _plain_sgd))
            _train_scaled(training, range(steps + 1, 15), None, None, drop)
            training.handle.synchronize()
        elif end != "with":
            getattr(training.handle, end)()
        weights.append(training.weights())
    return weights


@pytest.mark.parametrize(
    ("register", "end"),
    [
        *((Plan(6, 2, delay=1, mixing=0.25).register, end) for end in ("synchronize", "abort", "remove", "state_dict")),
        (Plan(3).register, "with"),
        *((averaged_every(3), end) for end in ("remove", "state_dict")),
    ],
)
def test_a_last_step_that_a_rank_skips_counts(rank_pools: Pools, end: str, register: Register) -> None:
    one, other = rank_pools[2].run(_skip_last, end, register, True, timeout=60.0)
    assert same(one, other)
    assert same(one, rank_pools[2].run(_skip_last, end, register, False, timeout=60.0)[0])


@pytest.mark.parametrize("skips", [False, True], ids=["finite", "nan"])
@on_ranks(2)
def test_a_step_that_follows_a_synchronisation_counts_once(skips: bool) -> None:
    ddp, optimizer, handle = begun(Plan(4).register)
    # Torch takes a step that moves nothing, for an optimizer that has no state yet.
    get_state_dict(ddp, optimizer)
    for step in range(1, 4):
        optimizer.zero_grad()
        # One gradient that is not finite: the end takes the step for one that was skipped.
        (sim.batch_loss(ddp, step, 0) * (float("nan") if skips and step == 3 else 1.0)).backward()
        handle.synchronize()
        optimizer.step()
    assert handle.state_dict()["state"]["step"] == 3


def _accumulate(skipped: int, empty: bool, synchronised: bool) -> tuple[int, Tensor]:
    """Rank 1 skips a step, or its first micro-batch has gradients that are all zero."""
    rank = dist.get_rank()
    ddp, optimizer, handle = begun(Plan(4, 2, delay=1).register, _plain_sgd)
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
    rank_pools: Pools, empty: bool, synchronised: bool
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


def test_schedulers_of_the_inner_optimizer_do_not_notice(rank_pools: Pools) -> None:
    for (rates, weights), (expected, same_weights) in zip(
        rank_pools[2].run(_with_scheduler, True), rank_pools[2].run(_with_scheduler, False), strict=True
    ):
        assert rates == expected
        # Both ranks train on the same data.
        torch.testing.assert_close(weights, same_weights, rtol=0, atol=CLOSE)
