# SPDX-License-Identifier: Apache-2.0
"""Hosts that lose their network, for good or for a while, whose packets come late, or whose connections are reset.

On emulated hosts: needs root and iproute2.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua.bench.emulated_hosts import Host, Network
from random_faults import ALGORITHMS, FIRST_STEPS, workload
from ranks import run_ranks
from reset_connections import reset_connections
from trouble import SLACK_SECONDS, Outcome, meet, same_cause, selection, store
from two_hosts import hosts_over, set_link

WORKLOADS = ("all_reduce", "ring of messages", "barrier", "bytegrad", "low_precision_decentralized")
STORE_PORT = 29400
TIMEOUT = 3.0
# Of ranks that have to find out earlier, or have nothing to find out.
LONG_TIMEOUT = 60.0
# In which the ranks find out who is missing; a rank that does not reach the store either relies on its transport.
GRACE = 4.0


def _add() -> None:
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert tensor[0].item() == dist.get_world_size()


def _work(address: str, name: str, timeout: float, seconds: float, trouble: Callable[[int], Any]) -> Outcome | None:
    """Work until an error, which is returned with how long after the trouble it came, or for so many seconds.

    The store is on rank 0. Trouble comes once all are at work, on a thread of each rank.
    """
    shared, rank, size = store(), dist.get_rank(), dist.get_world_size()
    served = dist.TCPStore(address, STORE_PORT, size, is_master=rank == 0, timeout=timedelta(seconds=120))
    meet(shared, "have the store", size)
    served.set_timeout(limit := timedelta(seconds=timeout))
    dist.destroy_process_group()
    dist.init_process_group("bagua", store=served, rank=rank, world_size=size, timeout=limit)
    step = _add if name == "all_reduce" else workload(name)
    for _ in range(FIRST_STEPS if name in ALGORITHMS else 1):
        step()
    meet(shared, "work", size)
    begun, goes_on, outcome = time.monotonic(), torch.ones(1), None
    with ThreadPoolExecutor(1) as pool:
        troubling = pool.submit(trouble, rank)
        try:
            while goes_on:
                step()
                # Whether to go on is the decision of one rank, so that all make the same calls.
                goes_on.fill_(time.monotonic() < begun + seconds)
                dist.broadcast(goes_on, 0)
        except RuntimeError as error:
            outcome = Outcome(str(error), time.monotonic() - begun)
        dist.destroy_process_group()
        troubling.result()
    # The store goes with rank 0: not before all have heard what there is to hear.
    meet(shared, "over", size)
    return outcome


def _go_through(
    hosts: list[Host],
    workload: str,
    trouble: Callable[[int], Any],
    timeout: float = TIMEOUT,
    seconds: float = 600.0,
) -> list[Any]:
    return run_ranks(len(hosts), _work, hosts[0].address, workload, timeout, seconds, trouble, hosts=hosts)


def _messages(outcomes: list[Any]) -> list[str]:
    """Return the errors, which all ranks had in time."""
    for outcome in outcomes:
        assert outcome.when < TIMEOUT + GRACE + SLACK_SECONDS, outcome
        assert outcome.message.startswith("bagua:")
    return [outcome.message for outcome in outcomes]


def _cut_off(host: Host, victim: int, seconds: float, rank: int) -> None:
    if rank == victim:
        set_link(host, "down")
        if seconds:
            time.sleep(seconds)
            set_link(host, "up")


def _reset_connections_to_the_store(rank: int) -> None:
    if rank == 1:
        assert reset_connections(lambda own, peer: STORE_PORT in (own, peer)) > 0


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["all_reduce"]))
def test_a_network_that_is_gone_for_a_while_costs_only_time(workload: str) -> None:
    with hosts_over(count=3) as hosts:
        assert not any(_go_through(hosts, workload, partial(_cut_off, hosts[1], 1, 1.0), LONG_TIMEOUT, seconds=4.0))


@pytest.mark.parametrize("workload", selection(WORKLOADS, ["low_precision_decentralized"]))
def test_a_host_that_loses_its_network_is_an_error_at_the_timeout_on_both_sides(workload: str) -> None:
    with hosts_over(count=3) as hosts:
        messages = _messages(_go_through(hosts, workload, partial(_cut_off, hosts[2], 2, 0.0)))
    # Those that still reach the store, which rank 0 holds, name the one that does not.
    assert "rank 2 (does not answer" in same_cause(messages[:2])


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["ring of messages"]))
def test_an_outage_longer_than_the_timeout_is_an_error_of_all_ranks(workload: str) -> None:
    with hosts_over(count=3) as hosts:
        messages = _messages(_go_through(hosts, workload, partial(_cut_off, hosts[2], 2, TIMEOUT + 0.5)))
    cause = same_cause(messages[:2])
    assert "rank 2 (does not answer" in cause
    # The one that was cut off hears of it if its connection to the store is back in time.
    assert messages[2].endswith(cause) or "The other ranks could not be told" in messages[2]


@pytest.mark.long
def test_connections_to_the_store_that_are_reset_cost_nothing() -> None:
    with hosts_over(count=3) as hosts:
        assert not any(_go_through(hosts, "all_reduce", _reset_connections_to_the_store, seconds=4.0))


def _reset_connections_and_cut_off(host: Host, was_reset: Path, rank: int) -> None:
    _reset_connections_to_the_store(rank)
    if rank == 1:
        was_reset.touch()
    while rank == 2 and not was_reset.exists():
        time.sleep(0.01)
    _cut_off(host, 2, 0.0, rank)


@pytest.mark.long
def test_a_rank_finds_the_store_again_after_a_reset(tmp_path: Path) -> None:
    with hosts_over(count=3) as hosts:
        trouble = partial(_reset_connections_and_cut_off, hosts[2], tmp_path / "was reset")
        outcomes = _go_through(hosts, "all_reduce", trouble)
    # It tells and hears of what only the store can have told.
    assert "rank 2 (does not answer" in same_cause([outcome.message for outcome in outcomes[:2]])


def _held(distance: int, seconds: float, rank: int) -> None:
    """Hold back all that is on its way between two hosts."""
    if rank == 0:
        os.kill(distance, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(distance, signal.SIGCONT)


@contextlib.contextmanager
def _distance() -> Iterator[int]:
    """Find the process of the program that lies between distant hosts, a child of this one; it goes on at the end."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (program,) = (
        int(child) for child in children if Path(f"/proc/{child}/comm").read_text().startswith("emulated_net")
    )
    try:
        yield program
    finally:
        os.kill(program, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["bytegrad", "ring of messages"]))
def test_packets_that_are_seconds_late_cost_only_time(workload: str) -> None:
    with hosts_over(Network(1e9, 0.01)) as hosts, _distance() as program:
        assert not any(_go_through(hosts, workload, partial(_held, program, 3.0), LONG_TIMEOUT, seconds=5.0))


@pytest.mark.long
@pytest.mark.parametrize("workload", selection(WORKLOADS, ["all_reduce"]))
def test_packets_that_are_later_than_the_timeout_are_an_error_on_both_sides(workload: str) -> None:
    with hosts_over(Network(1e9, 0.01)) as hosts, _distance() as program:
        messages = _messages(_go_through(hosts, workload, partial(_held, program, TIMEOUT + GRACE)))
    # Rank 0 holds the store; the other cannot ask for the cause before the packets go on.
    assert "rank 1 (does not answer" in messages[0]
