# SPDX-License-Identifier: Apache-2.0
"""Trouble on one rank ends the operations of all within the time promised, and all name the same cause."""

import itertools
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from trouble import (
    OPERATIONS,
    SLACK_SECONDS,
    TRANSPORTS,
    VICTIM,
    Outcome,
    announce_trouble,
    assert_names,
    calls,
    expect_error,
    kill_the_victim,
    same_cause,
    selection,
    store,
    time_of_trouble,
    warm_up,
)

SIZE = 3
TIMEOUT = 3.0
# A death has to be noticed within this time.
DEATH_SECONDS = 2.0


def _assert_same_cause(outcomes: Sequence[Outcome | None]) -> str:
    messages = [outcome.message for outcome in outcomes if outcome is not None]
    return same_cause(messages)


def _die_in(operation: str) -> tuple[Outcome, float] | None:
    warm_up()
    if dist.get_rank() == VICTIM:
        announce_trouble()
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = expect_error(calls()[operation])
    return outcome, time_of_trouble()


@pytest.mark.parametrize(
    ("operation", "transport"),
    selection(
        # Another rank may still send to whoever receives from any: see the timeouts below.
        itertools.product(sorted(OPERATIONS.keys() - {"recv from any"}), TRANSPORTS),
        [
            ("all_reduce", "in-host"),
            ("barrier", "in-host"),
            ("all_to_all", "between-hosts"),
            ("recv", "in-host"),
            ("send", "in-host"),
        ],
    ),
)
def test_a_death_is_noticed_within_two_seconds_by_all(operation: str, transport: str) -> None:
    results = run_ranks(SIZE, _die_in, operation, env=TRANSPORTS[transport], group_timeout=60.0, dying={VICTIM})
    survivors = [result for result in results if result is not None]
    assert len(survivors) == SIZE - 1
    for outcome, died in survivors:
        assert outcome.when - died < DEATH_SECONDS + SLACK_SECONDS
        assert_names(operation, outcome.message)
        assert f"rank {VICTIM}" in outcome.message
    _assert_same_cause([outcome for outcome, _ in survivors])


def _stop_in(operation: str) -> Outcome | None:
    warm_up()
    if dist.get_rank() == VICTIM:
        announce_trouble()
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()
    outcome = expect_error(calls()[operation])
    assert outcome.when - begun < TIMEOUT + SLACK_SECONDS
    # Whoever comes last ends the victim, which can do nothing any more.
    if store().add("done", 1) == SIZE - 1:
        kill_the_victim()
    return outcome


@pytest.mark.parametrize(
    ("operation", "transport"),
    selection(
        itertools.product(OPERATIONS, TRANSPORTS),
        [("all_reduce", "in-host"), ("broadcast", "between-hosts"), ("batch_isend_irecv", "between-hosts")],
    ),
)
def test_a_stopped_rank_is_named_at_the_timeout(operation: str, transport: str) -> None:
    outcomes = run_ranks(SIZE, _stop_in, operation, env=TRANSPORTS[transport], group_timeout=TIMEOUT, dying={VICTIM})
    cause = _assert_same_cause(outcomes)
    assert f"Timed out after {TIMEOUT * 1000:.0f} ms" in cause
    assert f"rank {VICTIM} (does not answer" in cause


def _hang_before(operation: str) -> Outcome | None:
    warm_up()
    outcome = None
    if dist.get_rank() == VICTIM:
        # As in a data loader that never returns: alive, but not coming.
        store().wait(["survivors are done"], timedelta(seconds=60))
    else:
        begun = time.monotonic()
        outcome = expect_error(calls()[operation])
        assert outcome.when - begun < TIMEOUT + SLACK_SECONDS
        if store().add("done", 1) == SIZE - 1:
            store().set("survivors are done", "yes")
    return outcome


@pytest.mark.parametrize(
    ("operation", "transport"),
    selection(
        itertools.product(OPERATIONS, TRANSPORTS),
        [("all_to_all", "in-host"), ("barrier", "between-hosts"), ("recv from any", "in-host")],
    ),
)
def test_a_rank_that_does_not_come_is_named_with_what_it_did_last(operation: str, transport: str) -> None:
    outcomes = run_ranks(SIZE, _hang_before, operation, env=TRANSPORTS[transport], group_timeout=TIMEOUT)
    cause = _assert_same_cause(outcomes)
    assert_names(operation, cause)
    assert "Timed out" in cause
    # The second of the two operations of the warm-up.
    assert f"rank {VICTIM} (has nothing under way, last completed bagua:all_reduce #1 (Float[3], sum)" in cause


def _leave_work_behind() -> list[Outcome]:
    warm_up()
    if dist.get_rank() == VICTIM:
        announce_trouble()
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(4)]
    return [expect_error(work.wait) for work in works if work is not None]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_queued_behind_the_failed_one_name_the_cause_too(transport: str) -> None:
    results = run_ranks(SIZE, _leave_work_behind, env=TRANSPORTS[transport], group_timeout=60.0, dying={VICTIM})
    outcomes = [outcome for result in results if result is not None for outcome in result]
    assert len(outcomes) == 4 * (SIZE - 1)
    _assert_same_cause(outcomes)
    for number in range(4):
        assert f"bagua:all_reduce #{2 + number} (Float[4], sum)" in outcomes[number].message


def _abort_on_one_rank() -> Outcome | None:
    warm_up()
    group: Any = dist.group.WORLD
    if dist.get_rank() == VICTIM:
        announce_trouble()
        group._get_backend(torch.device("cpu")).abort()
        return None
    return expect_error(calls()["all_reduce"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_abort_on_one_rank_reaches_the_others(transport: str) -> None:
    outcomes = run_ranks(SIZE, _abort_on_one_rank, env=TRANSPORTS[transport], group_timeout=60.0)
    assert outcomes[VICTIM] is None
    assert "the group was aborted" in _assert_same_cause(outcomes)


def _raise_in_backward() -> Outcome | None:
    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            if dist.get_rank() == VICTIM:
                raise ZeroDivisionError("the loss has exploded")
            return gradients[0]

    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                tensor = layer(tensor)
                if index == 1:
                    tensor = Fragile.apply(tensor)
            return tensor

    ddp = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=0.01)
    loss = ddp(torch.randn(8, 64)).sum()
    if dist.get_rank() == VICTIM:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        # What a script does that is ended by an exception.
        dist.destroy_process_group()
        return None
    return expect_error(loss.backward)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exception_in_the_backward_of_one_rank_ends_the_others(transport: str) -> None:
    outcomes = run_ranks(SIZE, _raise_in_backward, env=TRANSPORTS[transport], group_timeout=30.0)
    assert outcomes[VICTIM] is None
    _assert_same_cause(outcomes)


def _lose_the_store() -> Outcome | None:
    """Rank 0 holds the store, and dies with it."""
    rank = dist.get_rank()
    port = store()
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, SIZE, is_master=True, wait_for_workers=False)
        port.set("port", str(server.port))
    else:
        server = dist.TCPStore("127.0.0.1", int(port.get("port")), SIZE, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("bagua", store=server, rank=rank, world_size=SIZE, timeout=timedelta(seconds=TIMEOUT))
    warm_up()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    outcome = expect_error(lambda: dist.all_reduce(torch.ones(5)))
    assert outcome.when - begun < TIMEOUT + SLACK_SECONDS
    return outcome


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_store_that_is_gone_hides_no_error(transport: str) -> None:
    outcomes = run_ranks(SIZE, _lose_the_store, env=TRANSPORTS[transport], dying={0})
    for outcome in outcomes[1:]:
        assert "bagua:all_reduce #2" in outcome.message
    if transport == "in-host":
        assert any("the process of rank 0" in outcome.message for outcome in outcomes[1:])
