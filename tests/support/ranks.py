# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a process with an initialised process group.

    def double_sum(factor: int) -> float:
        tensor = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(tensor)
        return factor * tensor[0].item()

    assert run_ranks(3, double_sum, 2) == [6.0, 6.0, 6.0]

The error raised in the caller is that of the rank that failed first; its peers are killed. A rank that does not return
in time is named with the Python stack it hung in. Ranks are forked from a server that has torch imported and no
threads, so that starting four of them takes a fraction of a second, whatever the calling process has going on.

With BAGUA_TEST_DEVICE=cuda each rank has a GPU, of its own where there are enough: see gpus.py and devices.py.
"""

import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import gpus
import rank_process
from devices import DEVICE, TIME_FACTOR

if TYPE_CHECKING:
    from bagua.bench.emulated_hosts import Host

# A hung rank reports itself when its time is over; this is how much longer the parent waits for that report.
_GRACE_SECONDS = 20.0
_SECOND_LOOK_SECONDS = 0.3
_OUTPUT_CHARACTERS = 8000


def preload(*more: str) -> None:
    """What is imported once instead of in each rank, if that has not started yet."""
    # torch itself imports the last two, seconds of work, at the first assert_close() and the first optimizer.
    modules = ["numpy", "pytest", "bagua", "torch.distributed", "torch.distributed.tensor", "torch._dynamo", *more]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


preload()

# Ranks of the fixtures `ranks` and `peers`, and whether they share a GPU though each could have one.
POOLS = [(size, False) for size in (1, 2, 3, 4)]
if DEVICE == "cuda":
    POOLS += [(size, True) for size in (2, 4) if gpus.gpu_count() >= size]


class RankFailure(AssertionError):
    """A rank raised, died or hung."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class _Rank(NamedTuple):
    process: BaseProcess
    connection: Connection
    output: Path


class RankPool:
    """Ranks that are kept from one call of run() to the next; after a failure the next call starts new ones.

    `env` has the same value for all ranks, or a list with one for each, None where it is not set. What ranks print
    stays in a folder of `logs`, if that is given. `spawned` ranks inherit nothing: each imports torch for itself.
    `hosts` are emulated hosts, one for each rank.
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "bagua",
        *,
        env: Mapping[str, str | Sequence[str | None]] | None = None,
        group_timeout: float = 60.0,
        share_gpu: bool = False,
        spawned: bool = False,
        logs: Path | None = None,
        hosts: "Sequence[Host]" = (),
    ) -> None:
        self.world_size = world_size
        self.backend = backend
        self._env = dict(env or {})
        self._group_timeout = group_timeout
        self._share_gpu = share_gpu
        self._context: BaseContext = multiprocessing.get_context("spawn" if spawned else "forkserver")
        self._logs = logs
        self._hosts = hosts
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, dying: Collection[int] = ()
    ) -> list[Any]:
        """What the function returned on each rank. The ranks in `dying` have to end their process instead.

        `timeout` is in seconds, on CPUs.
        """
        __tracebackhide__ = True
        timeout *= TIME_FACTOR
        if not self._ranks:
            self._start()
        request = pickle.dumps((_describe(function), pickle.dumps(args), timeout))
        for rank in self._ranks:
            rank.connection.send_bytes(request)
        try:
            results = self._collect(function.__qualname__, timeout, set(dying))
        except BaseException:
            self._kill()
            raise
        if dying:
            self._kill()
        return results

    @property
    def has_started(self) -> bool:
        return bool(self._ranks)

    def close(self, seconds: float = _GRACE_SECONDS) -> None:
        """Ends the ranks in order; one that crashes or hangs while it destroys its process group is a failure."""
        for rank in self._ranks:
            rank.connection.send_bytes(b"")
        try:
            for index, rank in enumerate(self._ranks):
                rank.process.join(timeout=seconds)
                if rank.process.exitcode != 0:
                    raise self._failure(index, f"ended with {_describe_exit(rank.process)} after its last test")
        finally:
            self._kill()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.world_size}-ranks-", dir=self._logs))
        placed = gpus.placement_here(self.world_size, share=self._share_gpu) if DEVICE == "cuda" else None
        # The server takes its environment from here; with one thread each, four ranks do not fight for two cores.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
            for index in range(self.world_size):
                values = {name: value if isinstance(value, str) else value[index] for name, value in self._env.items()}
                env = {name: value for name, value in values.items() if value is not None}
                settings = rank_process.Settings(
                    index, self.world_size, self.backend, env, str(self._folder), self._group_timeout
                )
                if placed:
                    settings = settings._replace(env={**placed.env[index], **env}, device=f"cuda:{placed.gpus[index]}")
                if self._hosts:
                    host = self._hosts[index]
                    settings = settings._replace(env={**host.environment(), **env}, namespace=host.namespace)
                connection, remote = self._context.Pipe()
                # mypy does not know that every context has it.
                process = self._context.Process(  # type: ignore[attr-defined]
                    target=rank_process.main, args=(settings, remote), daemon=True
                )
                process.start()
                remote.close()
                self._ranks.append(_Rank(process, connection, rank_process.output_path(settings)))

    def _collect(self, name: str, timeout: float, dying: set[int]) -> list[Any]:
        __tracebackhide__ = True  # pytest shows the rank's traceback instead of ours
        results: list[Any] = [None] * self.world_size
        waiting = {rank.connection: index for index, rank in enumerate(self._ranks)}
        while waiting:
            ready = [c for c in wait(list(waiting), timeout + _GRACE_SECONDS) if isinstance(c, Connection)]
            if not ready:
                stuck = min(waiting.values())
                raise self._failure(stuck, f"gave no sign of life for {timeout + _GRACE_SECONDS:.0f} s in {name}")
            replies = [self._receive(waiting.pop(connection), connection) for connection in ready]
            if any(reply.error for reply in replies):
                # The cause may be a peer that failed, or died, at the same moment: the first of them is reported.
                more = [c for c in wait(list(waiting), _SECOND_LOOK_SECONDS) if isinstance(c, Connection)]
                replies += [self._receive(waiting.pop(connection), connection) for connection in more]
            for reply in sorted(replies, key=lambda reply: reply.when):
                if reply.exited and reply.rank in dying:
                    continue
                if reply.error:
                    raise self._failure(reply.rank, f"failed first in {name}: {reply.error}")
                if reply.rank in dying:
                    raise self._failure(reply.rank, f"was to die in {name} but returned")
                results[reply.rank] = reply.result
        return results

    def _receive(self, index: int, connection: Connection) -> rank_process.Reply:
        try:
            reply: rank_process.Reply = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._ranks[index].process
            process.join(timeout=_GRACE_SECONDS)
            # A death is the cause of the errors of its peers, never their consequence: it counts as the earliest.
            return rank_process.Reply(index, 0.0, None, f"it ended with {_describe_exit(process)}", exited=True)
        return reply

    def _failure(self, index: int, problem: str) -> RankFailure:
        message = f"rank {index} of {self.world_size} ({self.backend}) {problem}"
        for number, rank in enumerate(self._ranks):
            text = rank.output.read_text(errors="replace") if rank.output.exists() else ""
            if text:
                message += f"\n--- printed by rank {number} ---\n{text[-_OUTPUT_CHARACTERS:]}"
        return RankFailure(index, message)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join(timeout=_GRACE_SECONDS)
            rank.connection.close()
        self._ranks = []
        if self._folder is not None and self._logs is None:
            shutil.rmtree(self._folder)
        self._folder = None


Pools = dict[int, RankPool]


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "bagua",
    timeout: float = 120.0,
    env: Mapping[str, str | Sequence[str | None]] | None = None,
    group_timeout: float = 60.0,
    dying: Collection[int] = (),
    hosts: "Sequence[Host]" = (),
) -> list[Any]:
    """What the function returned on each of `world_size` new ranks."""
    with RankPool(world_size, backend, env=env, group_timeout=group_timeout, hosts=hosts) as pool:
        return pool.run(function, *args, timeout=timeout, dying=dying)


Body = Callable[..., None]


def on_ranks(where: int | str, timeout: float = 120.0) -> Callable[[Body], Body]:
    """Make a test of what every rank calls: on so many of `rank_pools`, or on the ranks of a fixture.

    Its arguments are parameters of the test.
    """
    fixture = "rank_pools" if isinstance(where, int) else where

    def run(body: Body, arguments: Sequence[Any], given: Any) -> None:
        __tracebackhide__ = True
        (given[where] if isinstance(where, int) else given).run(body, *arguments, timeout=timeout)

    return lambda body: _test_of(body, run, fixture)


def on_new_ranks(size: int, **options: Any) -> Callable[[Body], Body]:
    """As on_ranks(), on new ranks that run_ranks() starts with these options."""

    def run(body: Body, arguments: Sequence[Any]) -> None:
        __tracebackhide__ = True
        run_ranks(size, body, *arguments, **options)

    return lambda body: _test_of(body, run)


def _test_of(body: Body, run: Callable[..., None], *fixtures: str) -> Body:
    own = inspect.signature(body).parameters

    def test(**given: Any) -> None:
        __tracebackhide__ = True
        run(body, [given[name] for name in own], *(given[name] for name in fixtures))

    names = [*fixtures, *own]
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
    described = {name: getattr(body, name) for name in ("__name__", "__qualname__", "__module__", "__doc__")}
    vars(test).update(__signature__=signature, on_each_rank=body)
    for name, value in described.items():
        setattr(test, name, value)
    return test


def _describe(function: Callable[..., Any]) -> tuple[str, str, str]:
    if "<" in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} cannot be found by another process: make it a function of its module"
        )
    module = importlib.import_module(function.__module__)
    assert module.__file__ is not None
    return module.__name__, module.__file__, function.__qualname__


def _describe_exit(process: BaseProcess) -> str:
    return "no exit code: it still runs" if process.exitcode is None else f"exit code {process.exitcode}"
