# SPDX-License-Identifier: Apache-2.0
"""diloco without a schedule: what it chooses in the first steps, shows, keeps and does with it."""

import copy
import io
import os
import tempfile
import time
from typing import Any

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from hooked_models import same
from ranks import Pools
from rounds_training import momentum_sgd, three_layers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

# Eight steps are timed, and eight more beside an exchange; the ranks compare what they have found before the next.
FIRST_STEPS = 17


class Training:
    """A small model with diloco, whose steps take as long as they are told to."""

    def __init__(self, **options: Any) -> None:
        self.ddp = DDP(three_layers())
        self.optimizer = momentum_sgd(self.ddp)
        self.handle = bagua.register_comm_hook(self.ddp, "diloco", optimizer=self.optimizer, **options)
        self.steps = 0

    def train(self, steps: int, seconds: float = 0.0, *, skips: bool = False) -> None:
        for _ in range(steps):
            self.steps += 1
            time.sleep(seconds)
            self.optimizer.zero_grad()
            sim.batch_loss(self.ddp, self.steps, dist.get_rank()).backward()
            if not skips:
                self.optimizer.step()

    def weights(self) -> Tensor:
        return sim.flat(self.ddp.parameters())


def _by_itself(options: dict[str, Any]) -> tuple[dict[str, int], int, Tensor]:
    training = Training(**options)
    # Ranks whose steps take different times choose the same.
    training.train(FIRST_STEPS - 1, 0.01 * dist.get_rank())
    assert training.handle.stats()["chosen"] == {}
    training.train(1)
    assert training.handle.stats()["rounds"] == 0
    chosen = training.handle.stats()["chosen"]
    training.train(chosen["sync_every"])
    rounds = training.handle.stats()["rounds"]
    training.handle.synchronize()
    training.handle.reset()
    assert training.handle.stats()["chosen"] == chosen
    return chosen, rounds, training.weights()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"fragments": 3}),
        ({"codec": "int8", "hierarchical": False}, {"fragments": 3}),
        ({"sync_every": 40}, {"sync_every": 40, "fragments": 2}),
        ({"fragments": 2, "delay": 3}, {"sync_every": 30, "fragments": 2, "delay": 3}),
    ],
    ids=str,
)
def test_ranks_choose_the_same_schedule_and_follow_it(
    rank_pools: Pools, options: dict[str, Any], expected: dict[str, int]
) -> None:
    results = rank_pools[3].run(_by_itself, options)
    for chosen, rounds, weights in results:
        assert chosen == results[0][0]
        assert chosen | expected == chosen
        assert chosen["sync_every"] >= 30
        assert chosen["delay"] < chosen["sync_every"] / chosen["fragments"]
        # Each fragment once in a round.
        assert rounds == chosen["fragments"]
        assert same(weights, results[0][2])


def _broken(break_after: int) -> tuple[dict[str, int], Tensor]:
    """Train, and go on in another run from a checkpoint beside the first."""
    training = Training(mixing=0.5)
    training.train(break_after)
    chosen = dict(training.handle.stats()["chosen"])
    file = io.BytesIO()
    torch.save([training.ddp.module.state_dict(), training.optimizer.state_dict(), training.handle.state_dict()], file)
    whole, broken = training, Training(mixing=0.5)
    weights, optimizer, rounds = torch.load(io.BytesIO(file.getvalue()))
    broken.ddp.module.load_state_dict(weights)
    broken.optimizer.load_state_dict(optimizer)
    broken.handle.load_state_dict(rounds)
    assert broken.handle.stats()["chosen"] == chosen
    broken.steps = break_after
    for run in (whole, broken):
        run.train(30)
    assert same(whole.weights(), broken.weights())
    return chosen, copy.deepcopy(broken.weights())


def test_a_checkpoint_holds_what_was_chosen(rank_pools: Pools) -> None:
    for chosen, _ in rank_pools[2].run(_broken, FIRST_STEPS + 3):
        assert chosen["sync_every"] >= 30


def _goes_on_before_the_choice() -> dict[str, int]:
    training = Training()
    training.train(FIRST_STEPS - 4)  # the exchange may be on its way
    state = training.handle.state_dict()
    training.handle.load_state_dict(state)
    training.train(FIRST_STEPS - 1)
    assert training.handle.stats()["chosen"] == {}
    training.train(1)
    return dict(training.handle.stats()["chosen"])


def test_a_run_that_goes_on_from_before_the_choice_measures_anew(rank_pools: Pools) -> None:
    chosen = rank_pools[2].run(_goes_on_before_the_choice)
    assert chosen[0] == chosen[1] != {}


def _skips_the_last_measured_step() -> dict[str, int]:
    training = Training()
    training.train(FIRST_STEPS - 2)
    training.train(1, skips=dist.get_rank() == 0)
    dist.all_reduce(torch.ones(1))
    training.train(1)
    return dict(training.handle.stats()["chosen"])


def test_no_rank_waits_in_its_optimizer_for_one_that_skips_the_step(rank_pools: Pools) -> None:
    chosen = rank_pools[2].run(_skips_the_last_measured_step, timeout=30.0)
    assert chosen[0] == chosen[1] != {}


def _choose_and_say() -> str:
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        Training().train(FIRST_STEPS)
        os.dup2(before, 2)
        file.seek(0)
        return file.read().decode()


def test_one_rank_says_what_was_chosen(rank_pools: Pools) -> None:
    first, other = rank_pools[2].run(_choose_and_say)
    assert first.count("bagua: diloco goes on with sync_every=") == 1
    assert "bagua: diloco goes on" not in other
