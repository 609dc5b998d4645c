# SPDX-License-Identifier: Apache-2.0
"""local_sgd and diloco: checkpoints anywhere in a round, ends, and ranks that do not keep step."""

import copy
import io
import itertools
import time
from collections.abc import Sequence
from typing import Any

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from hooked_models import same
from ranks import Pools, run_ranks
from rounds_training import Plan, adam, momentum_sgd, three_layers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device


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
    rank_pools: Pools, plan: Plan, options: dict[str, Any]
) -> None:
    whole = rank_pools[2].run(_train_on, plan, options, [])
    broken = rank_pools[2].run(_train_on, plan, options, [1, 6, 7, 12])
    assert same(whole, broken)


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
            ("diloco", {"sync_every": 5, "fragments": 1, "delay": 0}),
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
    rank_pools: Pools, algorithm: str, options: dict[str, Any], call: str, steps: int
) -> None:
    weights = rank_pools[3].run(_end, algorithm, options, call, steps)
    assert all(same(weights[0], own) for own in weights)


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
def test_ranks_that_end_after_other_steps_are_told_both(rank_pools: Pools, end: str) -> None:
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
