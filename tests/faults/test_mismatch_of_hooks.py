# SPDX-License-Identifier: Apache-2.0
"""Hooks that differ between the ranks: an error on every rank that names what differs."""

import itertools
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import LAYOUTS, Outcome, cause_of, expect_error, new_world, selection

SIZE = 3
ODD_ONE = 1


def _register_on_one_rank() -> Outcome:
    new_world()
    ddp = DDP(torch.nn.Linear(4, 1))
    loss = ddp(torch.ones(2, 4)).sum()
    # DDP's forward is over on all ranks.
    dist.barrier()
    return expect_error((lambda: bagua.register_comm_hook(ddp, "bytegrad")) if _is_odd() else loss.backward)


def _is_odd() -> bool:
    return dist.get_rank() == ODD_ONE


@pytest.mark.parametrize("layout", selection(LAYOUTS, ["in-host"]))
def test_a_hook_that_only_one_rank_registers_is_an_error_on_all(layouts: dict[str, RankPool], layout: str) -> None:
    cause = cause_of(layouts[layout].run(_register_on_one_rank))
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
    new_world()
    alone = [dist.new_group([rank]) for rank in range(SIZE)][dist.get_rank()]
    name, options, length, _ = LAZY_HOOKS[case] if _is_odd() else ("bytegrad", {}, 4, "")
    # DDP itself compares the shapes of the ranks of its group.
    ddp = DDP(torch.nn.Linear(length, 1, bias=False), process_group=alone)
    ddp.register_comm_hook(*bagua.comm_hook(name, process_group=dist.group.WORLD, **options))
    outcome = expect_error(ddp(torch.ones(2, length)).sum().backward)
    # Torch tells how far a callback in Python had come, too.
    return outcome._replace(message=outcome.message.partition("\n\nAt:\n")[0])


@pytest.mark.parametrize(
    ("case", "layout"),
    selection(itertools.product(LAZY_HOOKS, LAYOUTS), [("options", "between-hosts"), ("models", "in-host")]),
)
def test_hooks_of_the_two_argument_form_that_differ_are_told_at_the_first_bucket(
    layouts: dict[str, RankPool], case: str, layout: str
) -> None:
    cause = cause_of(layouts[layout].run(_differ_lazily, case))
    assert "do not make the same call" in cause
    assert cause.count("bagua:reduce_bucket") >= 2
    assert LAZY_HOOKS[case][3] in cause
