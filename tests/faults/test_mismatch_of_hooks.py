# SPDX-License-Identifier: Apache-2.0
"""Hooks that differ between the ranks: an error on every rank that names what differs."""

import itertools
import os
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import (
    LAYOUTS,
    SLACK_SECONDS,
    TRANSPORTS,
    Outcome,
    announce_trouble,
    expect_error,
    same_cause,
    selection,
    time_of_trouble,
)

SIZE = 3
ODD_ONE = 1


def _register_on_one_rank() -> Outcome:
    ddp = DDP(torch.nn.Linear(4, 1))
    loss = ddp(torch.ones(2, 4)).sum()
    # DDP's forward is over on all ranks.
    dist.barrier()
    return expect_error((lambda: bagua.register_comm_hook(ddp, "bytegrad")) if _is_odd() else loss.backward)


def _is_odd() -> bool:
    return dist.get_rank() == ODD_ONE


@pytest.mark.parametrize("transport", selection(TRANSPORTS, ["in-host"]))
def test_a_hook_that_only_one_rank_registers_is_an_error_on_all(transport: str) -> None:
    outcomes = run_ranks(SIZE, _register_on_one_rank, env=TRANSPORTS[transport])
    cause = same_cause([outcome.message for outcome in outcomes])
    assert "do not make the same call" in cause
    assert "bagua:check_agreement" in cause
    assert "bagua:all_reduce" in cause


# What the odd rank hands to DDP, and how errors name it. The two-argument form meets the other ranks at the first
# bucket only.
LAZY_HOOKS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "options": ("bytegrad", {"average": False}, 4, "bytegrad(average=False"),
    "algorithms": ("gradient_allreduce", {}, 4, "gradient_allreduce("),
    "models": ("bytegrad", {}, 5, "Float[5]"),
}


def _differ_lazily(case: str) -> Outcome:
    alone = [dist.new_group([rank]) for rank in range(SIZE)][dist.get_rank()]
    name, options, length, _ = LAZY_HOOKS[case] if _is_odd() else ("bytegrad", {}, 4, "")
    # DDP itself compares the shapes of the ranks of its group.
    ddp = DDP(torch.nn.Linear(length, 1, bias=False), process_group=alone)
    ddp.register_comm_hook(*bagua.comm_hook(name, process_group=dist.group.WORLD, **options))
    outcome = expect_error(ddp(torch.ones(2, length)).sum().backward)
    # Torch tells how far a callback in Python had come, too.
    return outcome._replace(message=outcome.message.partition("\n\nAt:\n")[0])


@pytest.mark.parametrize(
    ("case", "transport"),
    selection(itertools.product(LAZY_HOOKS, LAYOUTS), [("options", "between-hosts"), ("models", "in-host")]),
)
def test_hooks_of_the_two_argument_form_that_differ_are_told_at_the_first_bucket(case: str, transport: str) -> None:
    outcomes = run_ranks(SIZE, _differ_lazily, case, env=LAYOUTS[transport])
    cause = same_cause([outcome.message for outcome in outcomes])
    assert "do not make the same call" in cause
    assert cause.count("bagua:reduce_bucket") >= 2
    assert LAZY_HOOKS[case][3] in cause


def _load_another_algorithm() -> tuple[Outcome, float]:
    ddp = DDP(torch.nn.Linear(4, 1))
    handle = bagua.register_comm_hook(ddp, "bytegrad")
    state = handle.state_dict()
    dist.barrier()
    if _is_odd():
        with pytest.raises(ValueError, match=r"'gradient_allreduce', this hook has 'bytegrad'"):
            handle.load_state_dict({**state, "algorithm": "gradient_allreduce"})
        # As a script that the exception ends.
        announce_trouble()
        os._exit(1)
    handle.load_state_dict(state)
    outcome = expect_error(ddp(torch.ones(2, 4)).sum().backward)
    return outcome, time_of_trouble()


@pytest.mark.parametrize("transport", selection(TRANSPORTS, ["in-host"]))
def test_a_rank_with_the_checkpoint_of_another_algorithm_says_so_and_the_others_end_with_it(transport: str) -> None:
    results = run_ranks(SIZE, _load_another_algorithm, env=TRANSPORTS[transport], dying={ODD_ONE})
    survivors = [result for result in results if result is not None]
    assert len(survivors) == SIZE - 1
    same_cause([outcome.message for outcome, _ in survivors])
    for outcome, left in survivors:
        assert outcome.when - left < SLACK_SECONDS
        assert f"rank {ODD_ONE}" in outcome.message
