# SPDX-License-Identifier: Apache-2.0
"""What the fault tests have in common: how a rank gets into trouble, and what its peers are to say about it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import IO, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

# Scheduling of busy processes on two cores, beside the time that is promised.
SLACK_SECONDS = 8.0
# A death has to be noticed within this time.
DEATH_SECONDS = 2.0
# How ranks exchange CPU tensors: through memory that they share, or each on a host of its own.
TRANSPORTS: dict[str, Mapping[str, str | Sequence[str]]] = {
    "in-host": {},
    "between-hosts": {"BAGUA_HOST_ID": [f"host-{rank}" for rank in range(4)]},
}
# For three or four ranks: the first two share a host, each of the others has one of its own.
LAYOUTS: dict[str, Mapping[str, str | Sequence[str]]] = {
    **TRANSPORTS,
    "uneven-hosts": {"BAGUA_HOST_ID": ["host-0", "host-0", "host-1", "host-2"]},
}
VICTIM = 2
# Calls that no rank completes without the victim, see calls(), and how errors name what they end in: a rank that only
# sends in the operation is caught in the barrier behind it.
OPERATIONS = {
    "all_reduce": "bagua:all_reduce #",
    "broadcast": "bagua:broadcast #",
    "reduce": "bagua:(reduce|barrier) #",
    "all_gather": "bagua:all_gather #",
    "all_gather_into_tensor": "bagua:all_gather_into_tensor #",
    "gather": "bagua:(gather|barrier) #",
    "scatter": "bagua:scatter #",
    "reduce_scatter": "bagua:reduce_scatter #",
    "reduce_scatter_tensor": "bagua:reduce_scatter_tensor #",
    "all_to_all": "bagua:all_to_all #",
    "all_to_all_single": "bagua:all_to_all_single #",
    "barrier": "bagua:barrier #",
    "send": "bagua:send ",
    "recv": "bagua:recv ",
    "irecv": "bagua:recv ",
    "recv from any": "bagua:recvAnySource ",
    "batch_isend_irecv": "bagua:(send|recv) ",
}
# `make test-faults` takes every case, `make test` a selection.
TAKES_ALL = "BAGUA_FAULT_MINUTES" in os.environ
_worlds, _warm_ups = itertools.count(), itertools.count()


class Outcome(NamedTuple):
    """What a surviving rank saw."""

    message: str
    when: float  # on the clock that all processes share


def selection(cases: Iterable[Any], selected: Iterable[Any]) -> list[Any]:
    """Return the cases that this run takes."""
    return list(cases if TAKES_ALL else selected)


def calls() -> dict[str, Callable[[], Any]]:
    """Return the calls that OPERATIONS names."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ones = torch.ones(5)
    many = torch.ones(300_000)

    def wait(work: dist.Work | None) -> None:
        assert work is not None
        work.wait()

    def exchange_with_the_victim() -> None:
        # More than the buffers of a connection hold.
        messages = [dist.P2POp(dist.isend, torch.ones(4_000_000), VICTIM), dist.P2POp(dist.irecv, ones, VICTIM)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(many),
        "broadcast": lambda: dist.broadcast(ones, VICTIM),
        "reduce": lambda: (dist.reduce(ones, 0), dist.barrier()),
        "all_gather": lambda: dist.all_gather([torch.ones(5) for _ in range(size)], ones),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(5 * size), ones),
        "gather": lambda: (
            dist.gather(ones, [torch.ones(5) for _ in range(size)] if rank == 0 else None),
            dist.barrier(),
        ),
        "scatter": lambda: dist.scatter(ones, None, src=VICTIM),
        "reduce_scatter": lambda: dist.reduce_scatter(ones, [torch.ones(5) for _ in range(size)]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones, torch.ones(5 * size)),
        "all_to_all": lambda: dist.all_to_all(
            [torch.ones(5) for _ in range(size)], [torch.ones(5) for _ in range(size)]
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(5 * size), torch.ones(5 * size)),
        "barrier": lambda: dist.barrier(),
        "send": lambda: dist.send(torch.ones(4_000_000), VICTIM),
        "recv": lambda: dist.recv(ones, VICTIM),
        "irecv": lambda: wait(dist.irecv(ones, VICTIM)),
        "recv from any": lambda: dist.recv(ones),
        "batch_isend_irecv": exchange_with_the_victim,
    }


def store() -> dist.Store:
    """Return the store of the default group."""
    found: dist.Store = dist.distributed_c10d._get_default_store()
    return found


def served_store(shared: dist.Store, rank: int, address: str = "127.0.0.1") -> dist.TCPStore:
    """Return a store that rank 0 serves at this address."""
    if rank == 0:
        served = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        shared.set("port", str(served.port))
        return served
    return dist.TCPStore(address, int(shared.get("port")))


def meet(shared: dist.Store, name: str, size: int) -> None:
    """Wait until so many ranks have come to where it has this name; each comes there once."""
    shared.add(name, 1)
    while shared.add(name, 0) < size:
        time.sleep(0.01)


def new_world(seconds: float = 60.0) -> None:
    """Put a new default group in the place of one that may be broken, once all ranks have come."""
    shared, rank, size = file_under(store()), dist.get_rank(), dist.get_world_size()
    name = f"world {next(_worlds)}"
    meet(shared, f"leave for {name}", size)
    dist.destroy_process_group()
    # One that is still busy with its former groups would come later than the others may have time.
    meet(shared, f"have left for {name}", size)
    make_world(shared, name, rank, size, seconds)


def make_world(shared: dist.Store, name: str, rank: int, size: int, seconds: float = 30.0) -> None:
    """Make a default group in a part of its own of a store that all ranks know."""
    part = dist.PrefixStore(name, shared)
    dist.init_process_group("bagua", store=part, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def warm_up(meeting: dist.Store | None = None) -> None:
    """Connect the ranks: trouble is then met in an exchange and not in the making of one.

    Returns on no rank before it is over on all, which an operation does not promise. They meet in a store, the default
    group's where none is given.
    """
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    meet(meeting or store(), f"warm-up {next(_warm_ups)}", dist.get_world_size())


def announce_trouble() -> None:
    """Of the victim: note the time, and how it can be reached."""
    store().set("victim", str(os.getpid()))
    store().set("trouble", str(time.monotonic()))


def die(file: dist.Store | None = None) -> None:
    """End this process as the kernel does, but not while one of its threads writes to the tests' store, a file.

    The store is the default group's where none is given.
    """
    with nobody_writes(file_under(file or store()).path):
        os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process, but not while one of its threads has the tests' store locked, which then nobody could use."""
    pid = os.getpid()
    # The child keeps the lock once this process has let it go, until each of its threads has stopped: before, one that
    # waits for the lock could still take it.
    script = f"read _; kill -STOP {pid}; while grep -q '^State:.[^TtZ]' /proc/{pid}/task/*/status; do sleep 0.01; done"
    with nobody_writes(file_under(store()).path) as entries:
        child = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, pass_fds=[entries.fileno()])
    child.communicate()


def file_under(part: dist.Store) -> Any:
    """Return the FileStore of which a test's store is a part."""
    while isinstance(part, dist.PrefixStore):
        part = part.underlying_store
    assert isinstance(part, dist.FileStore)  # type: ignore[attr-defined]
    return part


@contextlib.contextmanager
def nobody_writes(file: str) -> Iterator[IO[str]]:
    """Keep all ranks from writing to a FileStore, which takes the lock of the file that this gives.

    A rank that is killed in the middle would leave half an entry, over which FileStore loops for good on all others;
    one that is stopped there would keep the lock.
    """
    with open(file) as entries:
        fcntl.flock(entries, fcntl.LOCK_EX)
        yield entries


def time_of_trouble() -> float:
    """Wait for the victim's announcement."""
    return float(store().get("trouble"))


def kill_the_victim() -> None:
    """End a victim that cannot end itself, being stopped or stuck."""
    os.kill(int(store().get("victim")), signal.SIGKILL)


def expect_error(call: Callable[[], Any]) -> Outcome:
    """Return what the call raised, and when."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return Outcome(str(caught.value), time.monotonic())


def fail_without_the_victim(call: Callable[[], Any]) -> Outcome | None:
    """Return what the call raised on the ranks that make it; the victim stays away until they have all failed."""
    if dist.get_rank() == VICTIM:
        store().wait(["survivors are done"], timedelta(seconds=60))
        return None
    outcome = expect_error(call)
    if store().add("done", 1) == dist.get_world_size() - 1:
        store().set("survivors are done", "yes")
    return outcome


def assert_names(operation: str, message: str) -> None:
    """Assert that the error is one of this operation."""
    assert re.match(OPERATIONS[operation], message), message


def cause_of(outcomes: Sequence[Outcome | None]) -> str:
    """The cause that all who raised name; one that died has no outcome."""
    return same_cause([outcome.message for outcome in outcomes if outcome is not None])


def until_told(call: Callable[[], Any]) -> Callable[[], Any]:
    """A rank that exchanges something only with ranks that agree with it is told at the next call."""

    def calls() -> None:
        call()
        dist.all_reduce(torch.ones(2))

    return calls


def same_cause(messages: Sequence[str]) -> str:
    """Return how the messages of all ranks end: with what the rank that failed first has said."""
    cause = min((message.split("failed first: ")[-1] for message in messages), key=len)
    for message in messages:
        assert message.endswith(cause), (cause, message)
    return cause
