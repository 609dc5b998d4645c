# SPDX-License-Identifier: Apache-2.0
"""Many ranks on Gloo and on bagua, each a process forked from one that has imported torch, so that many fit in memory.

python benchmarks/ranks/beside_gloo.py --ranks 8 32 128 --json FILE

Measures what many_ranks does, through Python: the time of making a group, of its first call and of later calls, and the
private memory and connections of a rank. Every rank is on an emulated host of its own, and all speak over loopback.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import bagua  # noqa: F401  (before the forks, as torch)
import torch
import torch.distributed as dist

_FIELDS = ("group_seconds", "first_call_seconds", "seconds", "private_bytes", "connections")
_PATIENCE = 240


@dataclass
class Row:
    """What an operation took of the ranks: times of the slowest, means of the rest; bytes and seconds."""

    backend: str
    operation: str
    ranks: int
    group_seconds: float
    first_call_seconds: float
    seconds: float
    private_bytes: float
    connections: float


def _private_memory() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not tell the private memory of a process")


def _connections(store_port: int) -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as end:
                if end.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                count += store_port not in (end.getpeername()[1], end.getsockname()[1])
        except OSError:
            continue
    return count


def _call_of(operation: str, group: dist.ProcessGroup) -> Callable[[], Any]:
    if operation == "barrier":
        return lambda: dist.barrier(group=group)
    tensor = torch.ones(int(operation.rsplit("_", 1)[1]) // 4)
    return lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def _run_rank(
    backend: str, operation: str, rank: int, size: int, port: int, meeting: Barrier, calls: Any, seconds: float
) -> list[float]:
    os.environ["BAGUA_HOST_ID"] = f"many ranks, host {rank}"
    os.environ["BAGUA_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=_PATIENCE), wait_for_workers=False)
    memory = _private_memory()
    meeting.wait(_PATIENCE)
    begin = time.perf_counter()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_PATIENCE))
    group_seconds = time.perf_counter() - begin
    group = dist.group.WORLD
    assert group is not None
    call = _call_of(operation, group)
    meeting.wait(_PATIENCE)
    begin = time.perf_counter()
    call()
    first_seconds = time.perf_counter() - begin
    meeting.wait(_PATIENCE)
    begin = time.perf_counter()
    for _ in range(3):
        call()
    if rank == 0:
        calls.value = max(5, min(500, int(seconds * 3 / (time.perf_counter() - begin))))
    meeting.wait(_PATIENCE)
    begin = time.perf_counter()
    for _ in range(calls.value):
        call()
    took = (time.perf_counter() - begin) / calls.value
    meeting.wait(_PATIENCE)
    result = [group_seconds, first_seconds, took, _private_memory() - memory, _connections(port)]
    meeting.wait(_PATIENCE)
    return result


def _measure(backend: str, operation: str, size: int, seconds: float) -> Row:
    meeting = multiprocessing.Barrier(size)
    calls = multiprocessing.Value(ctypes.c_int, 0)
    results = multiprocessing.Array(ctypes.c_double, size * len(_FIELDS), lock=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(size):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                row = _run_rank(backend, operation, rank, size, port, meeting, calls, seconds)
                results[rank * len(_FIELDS) : (rank + 1) * len(_FIELDS)] = row
                meeting.wait(_PATIENCE)
                status = 0
            except BaseException as error:
                print(f"rank {rank} of {size}, {backend}: {error}", file=sys.stderr, flush=True)
                meeting.abort()
            os._exit(status)
        processes.append(process)
    failed = False
    for _ in processes:
        _, status = os.wait()
        if status != 0 and not failed:
            failed = True
            for process in processes:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
    if failed:
        raise RuntimeError(f"{operation} on {size} ranks with {backend} failed")
    columns = dict(zip(_FIELDS, zip(*zip(*[iter(results)] * len(_FIELDS), strict=True), strict=True), strict=True))
    means = {name: sum(columns[name]) / size for name in ("private_bytes", "connections")}
    slowest = {name: max(columns[name]) for name in ("group_seconds", "first_call_seconds", "seconds")}
    return Row(backend, operation, size, **slowest, **means)


def main() -> None:
    """Measure, print a table, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--backends", nargs="+", default=["gloo", "bagua"])
    operations = ["all_reduce_4096", "all_reduce_65536", "all_reduce_1048576", "barrier"]
    parser.add_argument("--operations", nargs="+", default=operations)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each operation is repeated")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    titles = f"{'ms':>10}{'group ms':>10}{'first ms':>10}{'MiB':>8}{'connect.':>10}"
    print(f"{'operation':<20}{'ranks':>6}{'backend':>8}{titles}")
    for size in arguments.ranks:
        for operation in arguments.operations:
            for backend in arguments.backends:
                row = _measure(backend, operation, size, arguments.seconds)
                rows.append(row)
                print(
                    f"{operation:<20}{size:>6}{backend:>8}{row.seconds * 1e3:>10.2f}{row.group_seconds * 1e3:>10.1f}"
                    f"{row.first_call_seconds * 1e3:>10.1f}{row.private_bytes / 2**20:>8.1f}{row.connections:>10.1f}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
