# SPDX-License-Identifier: Apache-2.0
"""Trains ranks under stock DDP with a hook, to be compared with simulations.py."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from hooked_models import emulated_hosts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 16
# Both sides round differently: order of sums, fused multiply-adds. One bucket stays within the first. Several buckets
# are of a larger model with larger gradients, whose numbers now and then fall to a neighbouring code.
ONE_BUCKET, SEVERAL_BUCKETS = 1e-5, 1e-3


# Settings of a run besides the plain one.
OTHER_LOOPS: dict[str, dict[str, Any]] = {
    "closure": {"habit": "closure"},
    "evaluation": {"habit": "evaluation"},
    "no_sync": {"plan": sim.accumulating(STEPS, synchronised=False)},
    "accumulation": {"plan": sim.accumulating(STEPS, synchronised=True)},
    "bucket_views": {"ddp_options": {"gradient_as_bucket_view": True}},
    "static_graph": {"ddp_options": {"static_graph": True}},
}
in_other_loops = pytest.mark.parametrize("loop", OTHER_LOOPS)


class Run(NamedTuple):
    model: nn.Module
    algorithm: str
    options: dict[str, Any]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    plan: sim.Plan = sim.one_batch_a_step(STEPS)
    hosts: str = ""
    ddp_options: dict[str, Any] | None = None
    habit: str = ""  # "closure": the optimizer runs the batches; "evaluation": the model is evaluated between steps


class Training(NamedTuple):
    """Of one rank and every step: the weights after the backward pass, after the optimizer's own part, at the end."""

    averaged: list[Tensor]
    stepped: list[Tensor]
    weights: list[Tensor]
    states: list[dict[str, Tensor]]
    stats: dict[str, Any]


def train_rank(run: Run) -> Training:
    with emulated_hosts(run.hosts or "h" * dist.get_world_size()) as group:
        ddp = DDP(run.model, process_group=group, **(run.ddp_options or {}))
        optimizer = run.make_optimizer(ddp)
        training = Training([], [], [], [], {})
        # Before the algorithm's own, if it has one: such hooks run in the order in which they are registered.
        optimizer.register_step_post_hook(lambda *_: training.stepped.append(sim.flat(ddp.parameters())))
        handle = bagua.register_comm_hook(ddp, run.algorithm, optimizer=optimizer, **run.options)
        for step in run.plan:
            if run.habit == "evaluation":
                _evaluate(ddp)
            training.averaged.append(take_step(ddp, optimizer, step, closure=run.habit == "closure"))
            training.weights.append(sim.flat(ddp.parameters()))
            training.states.append({k: v.clone() for k, v in handle.state_dict()["state"].items()})
        training.stats.update(handle.stats())
        return training


def take_step(
    ddp: DDP, optimizer: torch.optim.Optimizer, step: Sequence[sim.Batch], *, closure: bool = False
) -> Tensor:
    """The weights between the backward pass and the optimizer's own part."""
    seen = []

    def run_batches() -> float:
        optimizer.zero_grad()
        loss = 0.0
        for batch in step:
            with contextlib.nullcontext() if batch.synchronised else ddp.no_sync():
                result = sim.batch_loss(ddp, batch.number, dist.get_rank())
                result.backward()
            loss += result.item()
        seen.append(sim.flat(ddp.parameters()))
        return loss

    if closure:
        assert optimizer.step(run_batches) > 0  # type: ignore[arg-type, operator]
    else:
        run_batches()
        optimizer.step()
    assert len(seen) == 1
    return seen[0]


def _evaluate(ddp: DDP) -> None:
    """In each of the ways a forward pass is no step; differently often by rank."""
    rank = dist.get_rank()
    for number in range(rank + 1):
        with torch.no_grad():
            sim.batch_loss(ddp, number, rank)
        ddp.eval()
        sim.batch_loss(ddp, number, rank)
        with torch.inference_mode():
            sim.batch_loss(ddp, number, rank)
        ddp.train()


def assert_follows(runs: Sequence[Training], expected: Sequence[Sequence[Tensor]], tolerance: float) -> None:
    for step, weights in enumerate(expected):
        for rank, run in enumerate(runs):
            error = (run.weights[step] - weights[rank]).abs().max().item()
            assert error <= tolerance, f"rank {rank} is off by {error:.2g} after step {step}"
    moved = (expected[-1][0] - expected[0][0]).abs().max()
    assert moved > 30 * tolerance, "training that hardly moves shows nothing"
