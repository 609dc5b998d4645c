# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped, hang, raise or lose their connections at random moments, in whatever they do.

A few rounds by default; `make test-faults` goes on for BAGUA_FAULT_MINUTES. A round that fails prints its plan, which
BAGUA_FAULT_SEED= repeats first (but for the moment of the fault, which depends on the machine).
"""

import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_faults import ALGORITHMS, COLLECTIVES, FAULTS, Plan, Report, run
from ranks import run_ranks
from trouble import DEATH_SECONDS, SLACK_SECONDS, same_cause, selection

_PAIRS = list(itertools.product(("mixed collectives", *COLLECTIVES, *ALGORITHMS), FAULTS))
TIMEOUT = 3.0


def _plan(seed: int) -> Plan:
    """Seeds in a row walk through all pairs of a workload and a fault, in a new order each time."""
    walk, place = divmod(seed, len(_PAIRS))
    workload, fault = random.Random(f"walk {walk}").sample(_PAIRS, len(_PAIRS))[place]
    generator = random.Random(seed)
    size = generator.choice((2, 3, 4))
    return Plan(
        size=size,
        workload=workload,
        victim=generator.randrange(size),
        fault=fault,
        ranks_per_host=generator.choice((1, 2, size)),
        shares_memory=generator.random() < 0.5,
        is_hierarchical=generator.random() < 0.5,
        is_in_backward=generator.random() < 0.5,
        seed=seed,
        moment=generator.random() * 0.5,
    )


def _plans() -> Iterator[Plan]:
    minutes = float(os.environ.get("BAGUA_FAULT_MINUTES", "0"))
    end = time.monotonic() + 60 * minutes
    # The short form meets every fault once.
    not_met = set(FAULTS)
    for seed in itertools.count(int(os.environ.get("BAGUA_FAULT_SEED", time.time_ns() % 1_000_000))):
        if not not_met if minutes == 0 else time.monotonic() > end:
            return
        plan = _plan(seed)
        if minutes > 0 or plan.fault in not_met:
            not_met.discard(plan.fault)
            yield plan


def _round(plan: Plan) -> None:
    print(plan, flush=True)
    env = {
        "BAGUA_SHARED_MEMORY": "1" if plan.shares_memory else "0",
        "BAGUA_HOST_ID": [f"host-{rank // plan.ranks_per_host}" for rank in range(plan.size)],
    }
    dying = () if plan.fault == "raise" else {plan.victim}
    reports: list[Report] = run_ranks(plan.size, run, plan, env=env, group_timeout=TIMEOUT, dying=dying)
    del reports[plan.victim]
    limit = DEATH_SECONDS if plan.fault == "kill" else TIMEOUT + 2.0
    for report in reports:
        assert report.seconds < limit + SLACK_SECONDS
        assert "bagua:" in report.error
        assert not report.threads
        assert not [name for process in report.processes for name in Path("/dev/shm").glob(f"bagua-{process}-*")]
    assert f"rank {plan.victim}" in same_cause([report.error for report in reports])


# Hosts with one rank, and with two that share memory.
@pytest.mark.parametrize(
    ("algorithm", "fault", "ranks_per_host"),
    selection(
        itertools.product(ALGORITHMS, FAULTS, (1, 2)),
        [
            ("gradient_allreduce", "hang", 1),
            ("bytegrad", "kill", 2),
            ("decentralized", "stop", 1),
            ("low_precision_decentralized", "raise", 1),
            ("qadam", "hang", 2),
            ("async", "kill", 1),
        ],
    ),
)
def test_a_fault_in_an_algorithm_between_hosts(algorithm: str, fault: str, ranks_per_host: int) -> None:
    plan = Plan(
        size=ranks_per_host + 2,
        workload=algorithm,
        victim=1,
        fault=fault,
        ranks_per_host=ranks_per_host,
        shares_memory=True,
        is_hierarchical=True,
        is_in_backward=True,
        seed=0,
        moment=0.1,
    )
    _round(plan)


@pytest.mark.long
def test_random_faults() -> None:
    for plan in _plans():
        _round(plan)
