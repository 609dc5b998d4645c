# SPDX-License-Identifier: Apache-2.0
"""Runs a script on several ranks as `python script.py` does, without the seconds that each would take to import torch.

Each rank is forked from a process that has imported torch and has no threads, runs the script by the function of C that
`python -c` calls, and ends as an interpreter ends: exit handlers, threads, modules, destructors of libraries.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import random
import socket
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slowness import Moment, ends_of

if TYPE_CHECKING:
    from bagua.bench.emulated_hosts import Host


class End(NamedTuple):
    """How a rank has ended."""

    output: str
    code: int
    moment: Moment


class _Job(NamedTuple):
    script: str
    folder: str
    timeout: float
    arguments: Sequence[str]
    env: Sequence[Mapping[str, str]]
    namespaces: Sequence[str]


def run_script(
    script: str,
    ranks: int,
    folder: Path,
    *arguments: str,
    env: Mapping[str, str | Sequence[str]] | None = None,
    codes: Sequence[int] = (),
    timeout: float = 120.0,
    fresh: Sequence[str] = (),
    hosts: "Sequence[Host]" = (),
) -> list[End]:
    """Run a script in a folder, with the environment that torchrun gives and STORE, the name of a file.

    A value of `env` is that of all ranks, or a list with one for each; `codes` are the exit statuses to expect, else 0.
    Nothing is imported but the modules of `fresh` where it names some; a new interpreter imports them, for all ranks.
    `hosts` are emulated hosts, one for each rank.
    """
    __tracebackhide__ = True
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "STORE": f"{folder}/store"}
    on_hosts = [host.environment() for host in hosts] or [{}] * ranks
    environments = [
        on_hosts[rank]
        | {name: value if isinstance(value, str) else value[rank] for name, value in (env or {}).items()}
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **meeting}
        for rank in range(ranks)
    ]
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    connection, remote = context.Pipe()
    job = _Job(script, str(folder), timeout, arguments, environments, [host.namespace for host in hosts])
    starter = context.Process(target=_start, args=(job, list(fresh), remote))
    starter.start()
    remote.close()
    try:
        ends: list[End] = pickle.loads(connection.recv_bytes())
    finally:
        starter.join()
    for rank, (end, code) in enumerate(zip(ends, codes or [0] * ranks, strict=True)):
        assert end.code == code, f"rank {rank} ended with {end.code}:\n{end.output}"
    return ends


def free_port() -> int:
    """Return a port that is free, of those that the kernel hands to nobody who has not asked for them."""
    while True:
        port = random.SystemRandom().randrange(10_000, 24_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _start(job: _Job, imports: Sequence[str], connection: Connection) -> None:
    """Fork the ranks, in a process of its own, and wait for their ends."""
    for name in imports:
        __import__(name)
    # Not in a temporary folder, which every child would remove at its end.
    outputs = [Path(job.folder, f"output-{rank}") for rank in range(len(job.env))]
    processes = []
    for rank, output in enumerate(outputs):
        process = os.fork()
        if process == 0:
            try:
                _become(rank, job, output)
            except BaseException:
                traceback.print_exc()
            os._exit(70)  # never what the caller would do next
        processes.append(process)
    moments = ends_of(processes, job.timeout)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    texts = [output.read_text(errors="replace") for output in outputs]
    connection.send_bytes(pickle.dumps([End(*end) for end in zip(texts, codes, moments, strict=True)]))


def _become(rank: int, job: _Job, output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    os.chdir(job.folder)
    if job.namespaces:
        from two_hosts import enter

        enter(job.namespaces[rank])
    os.environ.update(job.env[rank])
    sys.argv = ["-c", *job.arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    # A rank that is aborted prints the stack of every thread. A timer of its own would hang the end of its forks.
    faulthandler.enable()
    failed = ctypes.pythonapi.PyRun_SimpleStringFlags(job.script.encode(), None)
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
