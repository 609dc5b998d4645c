# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped, hang, raise or lose their connections at random moments, in whatever they do.

A few rounds by default; `make test-faults` goes on for BAGUA_FAULT_MINUTES. A round that fails prints its plan, which
BAGUA_FAULT_SEED= repeats first (but for the moment of the fault, which depends on the machine).
"""

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from random_faults import ALGORITHMS, COLLECTIVES, FAULTS, START_SECONDS, Plan, Report, run
from trouble import SLACK_SECONDS, nobody_writes, same_cause, selection

_PAIRS = list(itertools.product(("mixed collectives", *COLLECTIVES, *ALGORITHMS), FAULTS))
TIMEOUT = 3.0
DEATH_SECONDS = 2.0

_context = multiprocessing.get_context("forkserver")


def _plan(seed: int) -> tuple[Plan, float]:
    """Return the plan and the moment of the fault, in seconds.

    Seeds in a row walk through all pairs of a workload and a fault, in a new order each time.
    """
    walk, place = divmod(seed, len(_PAIRS))
    workload, fault = random.Random(f"walk {walk}").sample(_PAIRS, len(_PAIRS))[place]
    generator = random.Random(seed)
    size = generator.choice((2, 3, 4))
    ranks_per_host = generator.choice((1, 2, size))
    plan = Plan(
        size=size,
        workload=workload,
        victim=generator.randrange(size),
        fault=fault,
        ranks_per_host=ranks_per_host,
        shares_memory=generator.random() < 0.5,
        is_hierarchical=generator.random() < 0.5,
        is_in_backward=generator.random() < 0.5,
        timeout=TIMEOUT,
        folder="",
        seed=seed,
    )
    return plan, generator.random() * 0.5


def _plans() -> Iterator[tuple[Plan, float]]:
    minutes = float(os.environ.get("BAGUA_FAULT_MINUTES", "0"))
    end = time.monotonic() + 60 * minutes
    # The short form meets every fault once.
    not_met = set(FAULTS)
    for seed in itertools.count(int(os.environ.get("BAGUA_FAULT_SEED", time.time_ns() % 1_000_000))):
        if not not_met if minutes == 0 else time.monotonic() > end:
            return
        plan, moment = _plan(seed)
        if minutes > 0 or plan.fault in not_met:
            not_met.discard(plan.fault)
            yield plan, moment


def _segments_of(ranks: Iterable[ForkServerProcess]) -> list[str]:
    return [entry.name for rank in ranks for entry in Path("/dev/shm").glob(f"bagua-{rank.pid}-*")]


def _check(plan: Plan, reports: dict[int, Report], faulted: float) -> None:
    cause = same_cause([report.error for report in reports.values()])
    limit = DEATH_SECONDS if plan.fault == "kill" else plan.timeout + 2.0
    for rank, report in reports.items():
        assert report.when - faulted < limit + SLACK_SECONDS, f"rank {rank} took {report.when - faulted:.1f} s"
        assert "bagua:" in report.error, report.error
        assert not report.threads, f"rank {rank} has left {report.threads}"
    assert f"rank {plan.victim}" in cause


def _round(plan: Plan, moment: float) -> None:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        plan = plan._replace(folder=folder)
        pipes = [_context.Pipe() for _ in range(plan.size)]
        ranks = [
            _context.Process(target=run, args=(rank, plan, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for rank, (_, theirs) in zip(ranks, pipes, strict=True):
                rank.start()
                theirs.close()
            connections = [ours for ours, _ in pipes]
            for connection in connections:
                assert connection.poll(START_SECONDS)
                assert connection.recv() == "working"
            time.sleep(moment)
            victim = ranks[plan.victim]
            assert victim.pid is not None
            faulted = time.monotonic()
            if plan.fault in ("kill", "stop"):
                with nobody_writes(Path(folder, "store")):
                    os.kill(victim.pid, signal.SIGKILL if plan.fault == "kill" else signal.SIGSTOP)
            else:
                connections[plan.victim].send(plan.fault)
            reports = {}
            for rank, connection in enumerate(connections):
                if rank == plan.victim:
                    continue
                assert connection.poll(plan.timeout + START_SECONDS), f"rank {rank} hangs"
                reports[rank] = connection.recv()
            _check(plan, reports, faulted)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    assert not _segments_of(ranks)


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
        timeout=TIMEOUT,
        folder="",
        seed=0,
    )
    _round(plan, moment=0.1)


@pytest.mark.long
def test_random_faults() -> None:
    for plan, moment in _plans():
        print(plan, flush=True)
        try:
            _round(plan, moment)
        except (Exception, pytest.fail.Exception) as error:
            pytest.fail(f"{plan}: {type(error).__name__}: {error}")
