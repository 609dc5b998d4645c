# SPDX-License-Identifier: Apache-2.0
"""Trouble on one rank ends the operations of all within the time promised, and all name the same cause."""

import itertools
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, run_ranks
from trouble import (
    DEATH_SECONDS,
    OPERATIONS,
    SLACK_SECONDS,
    TRANSPORTS,
    VICTIM,
    Outcome,
    announce_trouble,
    assert_names,
    calls,
    cause_of,
    die,
    expect_error,
    fail_without_the_victim,
    kill_the_victim,
    meet,
    new_world,
    selection,
    served_store,
    stop,
    store,
    time_of_trouble,
    warm_up,
)

SIZE = 3
TIMEOUT = 3.0


def _stop_in(operation: str) -> Outcome | None:
    warm_up()
    if dist.get_rank() == VICTIM:
        announce_trouble()
        stop()
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
        [("all_reduce", "in-host"), ("batch_isend_irecv", "between-hosts")],
    ),
)
def test_a_stopped_rank_is_named_at_the_timeout(operation: str, transport: str) -> None:
    outcomes = run_ranks(SIZE, _stop_in, operation, env=TRANSPORTS[transport], group_timeout=TIMEOUT, dying={VICTIM})
    cause = cause_of(outcomes)
    assert f"timed out after {TIMEOUT * 1000:.0f} ms" in cause
    assert f"rank {VICTIM} (does not answer" in cause


def _hang_before(operation: str) -> Outcome | None:
    new_world(TIMEOUT)
    warm_up()
    begun = time.monotonic()
    # As in a data loader that never returns: alive, but not coming.
    outcome = fail_without_the_victim(calls()[operation])
    assert outcome is None or outcome.when - begun < TIMEOUT + SLACK_SECONDS
    return outcome


@pytest.mark.parametrize(
    ("operation", "transport"),
    selection(
        itertools.product(OPERATIONS, TRANSPORTS),
        [("all_to_all", "in-host"), ("barrier", "between-hosts"), ("recv from any", "in-host")],
    ),
)
def test_a_rank_that_does_not_come_is_named_with_what_it_did_last(
    layouts: dict[str, RankPool], operation: str, transport: str
) -> None:
    cause = cause_of(layouts[transport].run(_hang_before, operation))
    assert_names(operation, cause)
    assert "Timed out" in cause
    # The second of the two operations of the warm-up.
    assert f"rank {VICTIM} (has nothing under way, last completed bagua:all_reduce #1 (Float[3], sum)" in cause


def _leave_work_behind() -> list[Outcome]:
    warm_up()
    if dist.get_rank() == VICTIM:
        announce_trouble()
        die()
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(4)]
    return [expect_error(work.wait) for work in works if work is not None]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_queued_behind_the_failed_one_name_the_cause_too(transport: str) -> None:
    results = run_ranks(SIZE, _leave_work_behind, env=TRANSPORTS[transport], group_timeout=60.0, dying={VICTIM})
    outcomes = [outcome for result in results if result is not None for outcome in result]
    assert len(outcomes) == 4 * (SIZE - 1)
    cause_of(outcomes)
    for number in range(4):
        assert f"bagua:all_reduce #{2 + number} (Float[4], sum)" in outcomes[number].message


def _abort_on_one_rank() -> Outcome | None:
    new_world()
    warm_up()
    group: Any = dist.group.WORLD
    if dist.get_rank() == VICTIM:
        group._get_backend(torch.device("cpu")).abort()
        return None
    return expect_error(calls()["all_reduce"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_abort_on_one_rank_reaches_the_others(layouts: dict[str, RankPool], transport: str) -> None:
    outcomes = layouts[transport].run(_abort_on_one_rank)
    assert outcomes[VICTIM] is None
    assert "the group was aborted" in cause_of(outcomes)


def _explode(_: torch.Tensor) -> None:
    if dist.get_rank() == VICTIM:
        announce_trouble()
        raise ZeroDivisionError("the loss has exploded")


def _raise_in_backward(is_destroyed: bool) -> tuple[Outcome, float] | None:
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    # After a part of the gradients.
    layers[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(_explode) and None)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    loss = ddp(torch.randn(8, 64)).sum()
    if dist.get_rank() == VICTIM:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        if is_destroyed:
            # What a script does that is ended by an exception.
            dist.destroy_process_group()
            return None
    # Else it stays, as one in a debugger, or in a handler that saves what it can.
    outcome = fail_without_the_victim(loss.backward)
    return outcome and (outcome, time_of_trouble())


@pytest.mark.parametrize(
    ("transport", "is_destroyed"),
    selection(itertools.product(TRANSPORTS, [True, False]), [("between-hosts", True), ("between-hosts", False)]),
)
def test_an_exception_in_the_backward_of_one_rank_ends_the_others(transport: str, is_destroyed: bool) -> None:
    timeout = 30.0 if is_destroyed else TIMEOUT
    results = run_ranks(SIZE, _raise_in_backward, is_destroyed, env=TRANSPORTS[transport], group_timeout=timeout)
    assert results[VICTIM] is None
    survivors = results[:VICTIM]
    cause = cause_of([outcome for outcome, _ in survivors])
    for outcome, raised in survivors:
        # Its connections end, or it does not come.
        assert outcome.when - raised < (DEATH_SECONDS if is_destroyed else timeout) + SLACK_SECONDS
    assert cause.startswith("bagua:all_reduce #")
    assert f"rank {VICTIM}" in cause
    # Which lives.
    assert "the process of" not in cause
    if not is_destroyed:
        assert f"rank {VICTIM} (has nothing under way, last completed bagua:" in cause


# Beyond the timeout: a store that does not answer cannot tell whether another rank knows more.
STORE_SECONDS = 3.0


def _lose_the_store(sent: signal.Signals) -> Outcome | None:
    """Rank 0 holds the store, and dies with it, or is stopped."""
    rank = dist.get_rank()
    shared = store()
    server = served_store(shared, rank)
    if rank == 0:
        shared.set("holder", str(os.getpid()))
    dist.destroy_process_group()
    # On a busy machine they come at different times: not what the timeout is to measure.
    meet(shared, "ready", SIZE)
    dist.init_process_group("bagua", store=server, rank=rank, world_size=SIZE, timeout=timedelta(seconds=TIMEOUT))
    warm_up(shared)
    if rank == 0:
        os.kill(os.getpid(), sent)
    begun = time.monotonic()
    outcome = expect_error(lambda: dist.all_reduce(torch.ones(5)))
    assert outcome.when - begun < TIMEOUT + STORE_SECONDS + SLACK_SECONDS
    if sent == signal.SIGSTOP and shared.add("done", 1) == SIZE - 1:
        os.kill(int(shared.get("holder")), signal.SIGKILL)
    return outcome


@pytest.mark.parametrize(
    ("transport", "sent"),
    selection(
        itertools.product(TRANSPORTS, [signal.SIGKILL, signal.SIGSTOP]),
        [("in-host", signal.SIGKILL), ("between-hosts", signal.SIGKILL), ("in-host", signal.SIGSTOP)],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_store_that_is_gone_hides_no_error(transport: str, sent: signal.Signals) -> None:
    outcomes = run_ranks(SIZE, _lose_the_store, sent, env=TRANSPORTS[transport], dying={0})
    for outcome in outcomes[1:]:
        assert "bagua:all_reduce #2" in outcome.message
        if sent == signal.SIGSTOP:
            assert "The other ranks could not be told" in outcome.message
    if transport == "in-host" and sent == signal.SIGKILL:
        messages = [outcome.message for outcome in outcomes[1:]]
        assert any("the process of rank 0" in message for message in messages), messages


def _errors_of_a_death() -> dict[str, tuple[str, str]]:
    """Return, by group: a description of the operation that failed, with its place in the group, and the error."""
    warm_up()
    everyone: Any = dist.group.WORLD
    pair = dist.new_group([1, VICTIM])
    if isinstance(pair, dist.ProcessGroup):
        dist.barrier(pair)
    dist.barrier()
    if dist.get_rank() == VICTIM:
        die()
    ones = torch.ones(8, dtype=torch.float64)
    error = expect_error(lambda: dist.all_reduce(ones)).message
    found = {everyone.group_name: (f"all_reduce #3 (Double[8], sum) on rank {dist.get_rank()} of {SIZE}", error)}
    if isinstance(pair, dist.ProcessGroup):
        error = expect_error(lambda: dist.broadcast(ones, VICTIM, group=pair)).message
        found[pair.group_name] = ("broadcast #1 (Double[8], peer rank 1) on rank 0 of 2", error)
    return found


@pytest.mark.parametrize("transport", selection(TRANSPORTS, ["in-host"]))
def test_an_error_says_what_has_failed_and_in_which_group(transport: str) -> None:
    found = run_ranks(SIZE, _errors_of_a_death, env=TRANSPORTS[transport], dying={VICTIM})[:VICTIM]
    # Groups have names of their own.
    assert [len(errors) for errors in found] == [1, 2]
    for errors in found:
        for name, (description, message) in errors.items():
            operation, own = re.findall(r"^(\w+) .*on rank (\d)", description)[0]
            # A peer may have found out before this rank has begun.
            late = f"bagua:{operation} on rank {own}: group '{name}' is unusable since an earlier failure: "
            if message.startswith(late):
                other = description.replace(f"on rank {own}", f"on rank {1 - int(own)}")
                assert f"bagua:{other}, group '{name}' failed:" in message
            else:
                assert message.startswith(f"bagua:{description}, group '{name}' failed:"), message


def _train_on_gloo(sent: signal.Signals) -> Outcome | None:
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
    for _ in range(3):
        ddp(torch.ones(2, 64)).sum().backward()
    if dist.get_rank() == VICTIM:
        announce_trouble()
        {signal.SIGKILL: die, signal.SIGSTOP: stop}[sent]()
    loss = ddp(torch.ones(2, 64)).sum()
    begun = time.monotonic()
    outcome = expect_error(loss.backward)
    assert outcome.when - begun < (DEATH_SECONDS if sent == signal.SIGKILL else TIMEOUT) + SLACK_SECONDS
    if sent == signal.SIGSTOP and store().add("done", 1) == SIZE - 1:
        kill_the_victim()
    return outcome


@pytest.mark.parametrize(
    "sent", selection([signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL]), ids=lambda value: value.name
)
def test_a_hook_on_a_stock_gloo_group_names_the_rank_in_trouble(sent: signal.Signals) -> None:
    timeout = 60.0 if sent == signal.SIGKILL else TIMEOUT
    outcomes = run_ranks(SIZE, _train_on_gloo, sent, backend="gloo", group_timeout=timeout, dying={VICTIM})
    cause = cause_of(outcomes)
    described = r"bagua:reduce_bucket #\d+ \(Float\[4160\], bytegrad\(.*\), gradients 1-0\)"
    assert re.match(rf"{described} on rank [01] of 3, group '.+' failed: ", cause), cause
    assert (f"the process of rank {VICTIM}" if sent == signal.SIGKILL else f"rank {VICTIM} (does not answer") in cause
