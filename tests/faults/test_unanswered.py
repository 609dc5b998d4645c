# SPDX-License-Identifier: Apache-2.0
"""Work that another rank never answers, though it lives: an abort from another thread, a destroyed group or the end of
the process is not held up by it."""

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import bagua
import pytest
import torch
import torch.distributed as dist
from holdings import holdings, more_than, wait_for
from hooked_models import emulated_hosts
from ranks import run_ranks
from script_ranks import run_script
from threads import bagua_threads
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import SLACK_SECONDS, TRANSPORTS, Outcome, expect_error, make_world, selection, store, warm_up

CPU = torch.device("cpu")
# What shutdown() waits for work that may yet be done, and some more for the end of threads and a process.
END_SECONDS = 10.0
# Long enough for a rank that waits to have fallen asleep. What a test expects is the same before.
ASLEEP_SECONDS = 0.2


# --- abort from another thread ---


class Aborted(NamedTuple):
    """What the thread that waited was told, and how long after the abort; how long that itself took."""

    outcome: Outcome
    begun: float
    ended: float


def _aborted(backend: Any, is_under_way: Callable[[], object], call: Callable[[], Any]) -> Aborted:
    """Make the call here; abort the group on another thread once it is under way."""
    times: list[float] = []

    def abort() -> None:
        assert wait_for(is_under_way, 30.0)
        time.sleep(ASLEEP_SECONDS)
        times.append(time.monotonic())
        backend.abort()
        times.append(time.monotonic())

    aborting = threading.Thread(target=abort)
    aborting.start()
    outcome = expect_error(call)
    aborting.join()
    return Aborted(outcome, *times)


def _abort_collective(call: Callable[[], Any], group: Any) -> Aborted:
    # Of the backend: before torch 2.14 a group asks only backends whose names it knows.
    backend = group._get_backend(CPU)
    before = backend._get_sequence_number_for_group()
    return _aborted(backend, lambda: backend._get_sequence_number_for_group() > before, call)


def _abort_message() -> Aborted:
    is_posted = threading.Event()

    def receive() -> None:
        work = dist.irecv(torch.zeros(3), 1)
        assert work is not None
        is_posted.set()
        work.wait()

    group: Any = dist.group.WORLD
    return _aborted(group._get_backend(CPU), is_posted.is_set, receive)


# Rank 0 alone makes them.
UNANSWERED: dict[str, Callable[[], Aborted]] = {
    "all_reduce": lambda: _abort_collective(lambda: dist.all_reduce(torch.ones(300_000)), dist.group.WORLD),
    "barrier": lambda: _abort_collective(lambda: dist.barrier(), dist.group.WORLD),
    "recv": _abort_message,
}


def _by_rank_0(abort: Callable[[], Aborted]) -> Aborted | None:
    """Have the other rank wait meanwhile."""
    if dist.get_rank() == 1:
        store().wait(["released"], timedelta(seconds=60))
        return None
    aborted = abort()
    store().set("released", "yes")
    return aborted


def _abort_while_waiting(call: str, is_connected: bool) -> Aborted | None:
    if is_connected:
        warm_up()
    return _by_rank_0(UNANSWERED[call])


def _assert_released(aborted: Aborted | None) -> str:
    assert aborted is not None
    assert aborted.ended - aborted.begun < SLACK_SECONDS
    assert aborted.outcome.when - aborted.begun < SLACK_SECONDS
    assert "the group was aborted" in aborted.outcome.message
    return aborted.outcome.message


# Ranks connect in their first operation.
@pytest.mark.parametrize(
    ("call", "is_connected", "transport"),
    selection(
        itertools.product(UNANSWERED, (True, False), TRANSPORTS),
        [
            ("all_reduce", True, "in-host"),
            ("all_reduce", True, "between-hosts"),
            ("barrier", False, "in-host"),
            ("recv", True, "between-hosts"),
        ],
    ),
)
def test_an_abort_from_another_thread_releases_those_who_wait(call: str, is_connected: bool, transport: str) -> None:
    aborted = run_ranks(2, _abort_while_waiting, call, is_connected, env=TRANSPORTS[transport])[0]
    assert f"bagua:{call}" in _assert_released(aborted)


def _abort_in_backward() -> Aborted | None:
    # A host each: on one host bytegrad has nothing to compress.
    with emulated_hosts("ab") as group:
        ddp = DDP(torch.nn.Linear(2000, 100), process_group=group)
        handle = bagua.register_comm_hook(ddp, "bytegrad")
        for _ in range(2):
            ddp(torch.ones(2, 2000)).sum().backward()
        assert "compress" in handle.stats()["seconds"]
        loss = ddp(torch.ones(2, 2000)).sum()
        return _by_rank_0(lambda: _abort_collective(loss.backward, group))


def test_an_abort_from_another_thread_releases_a_backward() -> None:
    message = _assert_released(run_ranks(2, _abort_in_backward)[0])
    assert "bagua:reduce_bucket" in message
    assert "bytegrad(" in message


def _abort_while_a_group_is_made() -> Aborted | None:
    warm_up()
    default: Any = dist.group.WORLD
    is_begun = threading.Event()

    def make() -> None:
        is_begun.set()
        dist.new_group(timeout=timedelta(seconds=2))

    return _by_rank_0(lambda: _aborted(default._get_backend(CPU), is_begun.is_set, make))


def test_a_group_that_cannot_be_made_holds_up_no_abort_and_names_who_is_missing() -> None:
    aborted = run_ranks(2, _abort_while_a_group_is_made)[0]
    assert aborted.ended - aborted.begun < SLACK_SECONDS
    assert "could not make the process group" in aborted.outcome.message
    assert "Not there after 2000 ms: rank 1" in aborted.outcome.message


# --- destroy_process_group() ---

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(300_000), async_op=True),
    "irecv": lambda: dist.irecv(torch.zeros(3), 1),
    "isend": lambda: dist.isend(torch.zeros(3_000_000), 1),
}


def _destroy_with_work_under_way(call: str) -> tuple[float, list[str], str]:
    shared, rank = store(), dist.get_rank()
    dist.destroy_process_group()
    assert wait_for(lambda: not bagua_threads())
    before = holdings()
    make_world(shared, "unanswered", rank, 2, 120.0)
    warm_up()
    seconds, message = 0.0, ""
    if rank == 0:
        work = CALLS[call]()
        begin = time.monotonic()
        dist.destroy_process_group()
        seconds = time.monotonic() - begin
        message = expect_error(work.wait).message
        del work
        shared.set("destroyed", "yes")
    else:
        shared.wait(["destroyed"], timedelta(seconds=60))
        dist.destroy_process_group()

    def left() -> list[str]:
        # The process keeps its sockets, and their thread, for the groups to come.
        return [held for held in more_than(before) if held not in ("threads: bagua_wire", "files: socket")]

    wait_for(lambda: not left())
    return seconds, left(), message


@pytest.mark.parametrize(
    ("call", "transport"),
    selection(itertools.product(CALLS, TRANSPORTS), [("all_reduce", "in-host"), ("irecv", "between-hosts")]),
)
def test_a_group_may_be_destroyed_whose_work_nobody_answers(call: str, transport: str) -> None:
    results = run_ranks(2, _destroy_with_work_under_way, call, env=TRANSPORTS[transport], group_timeout=120.0)
    seconds, _, message = results[0]
    assert seconds < END_SECONDS + SLACK_SECONDS
    assert "shut down" in message
    assert not any(left for _, left, _ in results)


def _destroy_and_keep_the_hook() -> tuple[float, str]:
    ddp = DDP(torch.nn.Linear(4, 1))
    handle = bagua.register_comm_hook(ddp, "bytegrad")
    ddp(torch.ones(2, 4)).sum().backward()
    shared = store()
    if dist.get_rank() == 1:
        shared.set("destroyed", str(time.monotonic()))
        dist.destroy_process_group()
        shared.wait(["noticed"], timedelta(seconds=60))
        assert handle.stats()["steps"] == 1
        return 0.0, ""
    destroyed = float(shared.get("destroyed"))
    outcome = expect_error(lambda: dist.all_reduce(torch.ones(5)))
    shared.set("noticed", "yes")
    return outcome.when - destroyed, outcome.message


def test_a_rank_that_has_destroyed_its_group_is_missed_at_once_though_a_hook_still_holds_it() -> None:
    seconds, message = run_ranks(2, _destroy_and_keep_the_hook, group_timeout=120.0)[0]
    assert seconds < SLACK_SECONDS
    # Beside our own words those of Gloo, which others look for.
    assert "Connection closed by peer: rank 1 has left the exchange in shared memory" in message


# Rank 0 alone makes them.
MESSAGES: dict[str, Callable[[], Any]] = {
    "recv": lambda: dist.recv(torch.zeros(3), 1),
    "recv from any": lambda: dist.recv(torch.zeros(3)),
    "send": lambda: dist.send(torch.zeros(3_000_000), 1),
}


def _wait_for_one_who_leaves(call: str, is_gone: bool) -> tuple[float, str]:
    shared = store()
    warm_up()
    if dist.get_rank() == 1:
        if not is_gone:
            shared.wait(["waits"], timedelta(seconds=60))
            time.sleep(ASLEEP_SECONDS)
        left = time.monotonic()
        dist.destroy_process_group()
        shared.set("left", str(left))
        shared.wait(["noticed"], timedelta(seconds=60))
        return 0.0, ""
    if is_gone:
        shared.wait(["left"], timedelta(seconds=60))
    else:
        shared.set("waits", "yes")
    outcome = expect_error(MESSAGES[call])
    shared.set("noticed", "yes")
    return outcome.when - float(shared.get("left")), outcome.message


@pytest.mark.parametrize(
    ("call", "is_gone", "transport"),
    selection(
        itertools.product(MESSAGES, (True, False), TRANSPORTS),
        [("recv", True, "in-host"), ("recv from any", False, "in-host"), ("send", False, "between-hosts")],
    ),
)
def test_a_message_ends_where_its_peer_has_destroyed_the_group_and_lives(
    call: str, is_gone: bool, transport: str
) -> None:
    arguments: Any = (call, is_gone)
    seconds, message = run_ranks(
        2, _wait_for_one_who_leaves, *arguments, env=TRANSPORTS[transport], group_timeout=120.0
    )[0]
    assert seconds < SLACK_SECONDS
    assert "rank 1 has left the group" in message


# --- the end of a process ---

# Rank 0 ends while work of its groups waits for rank 1, which makes no call and stays until rank 0 is gone.
LEAVING = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
rank, call, end = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
groups = [None, *(dist.new_group() for _ in range(7 if call == "all_reduce" else 0))]
for group in groups:
    dist.all_reduce(torch.ones(4), group=group)
print(os.getpid(), flush=True)
if rank == 0:
    if call == "all_reduce":
        works = [dist.all_reduce(torch.ones(300_000), group=group, async_op=True) for group in groups]
    elif call == "irecv":
        work = dist.irecv(torch.zeros(3), 1)
    else:
        work = dist.isend(torch.zeros(3_000_000), 1)
    store.set("leaves", str(os.getpid()))
    print(time.monotonic(), flush=True)
    if end == "destroys":
        dist.destroy_process_group()
else:
    stat = Path("/proc", store.get("leaves").decode(), "stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("call", "end", "transport"),
    selection(
        itertools.product(CALLS, ("exits", "destroys"), TRANSPORTS),
        [
            ("all_reduce", "exits", "between-hosts"),
            pytest.param("irecv", "exits", "in-host", marks=pytest.mark.long),
        ],
    ),
)
def test_a_process_may_end_whose_work_nobody_answers(call: str, end: str, transport: str, tmp_path: Path) -> None:
    ends = run_script(LEAVING, 2, tmp_path, call, end, env=TRANSPORTS[transport])
    (process, begin, *_), (other, *_) = (end.output.split() for end in ends)
    for number in (process, other):
        assert not list(Path("/dev/shm").glob(f"bagua-{number}-*"))
    took = ends[0].moment.when - float(begin)
    assert call != "all_reduce" or took > 4, "the work might yet have been done"
    # Five seconds for each of eight groups would be forty.
    assert took < END_SECONDS + 2 * SLACK_SECONDS
