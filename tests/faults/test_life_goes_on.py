# SPDX-License-Identifier: Apache-2.0
"""After an error: the survivors build a new group in the same process, and nothing of the old one is left."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from threads import bagua_threads
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TRANSPORTS, VICTIM, expect_error, store, warm_up

SIZE = 3
SHARED_MEMORY = Path("/dev/shm")


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _segments() -> list[str]:
    return sorted(entry.name for entry in SHARED_MEMORY.glob("bagua-*"))


def _wait_for(condition: Any, seconds: float = 10.0) -> bool:
    """Threads that nobody may wait for end a moment after the group."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def _new_world(name: str, size: int) -> None:
    """Make another default group of the ranks that are left, in a store of its own."""
    rank = dist.get_rank()
    folder = Path(os.environ["FAULTS_FOLDER"])
    dist.destroy_process_group()
    fresh = dist.FileStore(str(folder / name), size)  # type: ignore[attr-defined]
    dist.init_process_group("bagua", store=fresh, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def _train(steps: int) -> list[float]:
    import bagua

    torch.manual_seed(dist.get_rank())
    ddp = DDP(torch.nn.Linear(8, 3))
    bagua.register_comm_hook(ddp, "bytegrad")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    weights: list[float] = next(iter(ddp.parameters())).detach().flatten().tolist()
    return weights


def _survive_a_death() -> tuple[list[float], list[str], bool]:
    warm_up()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error(lambda: dist.all_reduce(torch.ones(5)))
    _new_world("after", SIZE - 1)
    weights = _train(3)
    dist.destroy_process_group()
    gone = _wait_for(lambda: not bagua_threads())
    return weights, bagua_threads(), gone


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_train_on_in_a_new_group(transport: str, tmp_path: Path) -> None:
    env = {**TRANSPORTS[transport], "FAULTS_FOLDER": str(tmp_path)}
    results = run_ranks(SIZE, _survive_a_death, env=env, dying={VICTIM})
    assert results[0][0] == results[1][0]
    for _, threads, gone in results[:VICTIM]:
        assert gone, threads


def _make_and_drop_groups() -> tuple[int, list[str], list[str]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    before = 0
    for cycle in range(8):
        group: Any = dist.new_group(list(range(size)), timeout=timedelta(seconds=20))
        dist.all_reduce(torch.ones(10), group=group)
        # In one order or the other, with work in flight or without, once or twice.
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        if cycle % 2 == 0 and work is not None:
            work.wait()
        backend = group._get_backend(torch.device("cpu"))
        if cycle % 4 == 3:
            dist.barrier()
            backend.abort()
        dist.destroy_process_group(group)
        backend.shutdown()
        del group, work, backend
        gc.collect()
        dist.barrier()
        if cycle == 1:
            before = _open_files()
    _wait_for(lambda: _open_files() <= before)
    assert rank < size
    return (
        _open_files() - before,
        bagua_threads(),
        [name for name in _segments() if name.startswith(f"bagua-{os.getpid()}-")],
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_leave_no_file_or_segment_behind(transport: str) -> None:
    for files, _, left in run_ranks(2, _make_and_drop_groups, env=TRANSPORTS[transport]):
        assert files <= 0
        assert not left


def _abort_from_another_thread() -> tuple[float, str]:
    warm_up()
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    if dist.get_rank() == 1:
        store().wait(["released"], timedelta(seconds=30))
        return 0.0, ""
    begun: list[float] = []

    def abort() -> None:
        begun.append(time.monotonic())
        backend.abort()

    timer = threading.Timer(0.5, abort)
    timer.start()
    outcome = expect_error(lambda: dist.all_reduce(torch.ones(300_000)))
    timer.join()
    store().set("released", "yes")
    return outcome.when - begun[0], outcome.message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_abort_from_another_thread_releases_those_who_wait(transport: str) -> None:
    seconds, message = run_ranks(2, _abort_from_another_thread, env=TRANSPORTS[transport])[0]
    assert seconds < 5.0
    assert "the group was aborted" in message


LEAVING = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(path, 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
dist.all_reduce(torch.ones(4))
if how == "without destroying":
    dist.barrier()
elif how == "with work in flight":
    work = dist.all_reduce(torch.ones(1000), async_op=True)
elif how == "with an exception":
    dist.barrier()
    raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("without destroying", 0), ("with work in flight", 0), ("with an exception", 7)]
)
def test_a_script_may_end_without_destroying_its_group(how: str, code: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING, str(rank), str(tmp_path / "store"), how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == code, output
    own = tuple(f"bagua-{rank.pid}-" for rank in ranks)
    assert not [name for name in _segments() if name.startswith(own)]


CREATING = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
print("ready", flush=True)
for number in range(10_000):
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=group)
    dist.destroy_process_group(group)
"""


def test_ranks_killed_while_they_make_segments_leave_none(tmp_path: Path) -> None:
    """Whatever the moment: what is left loses its name when the next group is made."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CREATING, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    own = tuple(f"bagua-{rank.pid}-" for rank in ranks)
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    # In one of the moments in which a segment has a name: they are few.
    _wait_for(lambda: any(name.startswith(own) for name in _segments()), 5.0)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate(timeout=60)
    left = [name for name in _segments() if name.startswith(own)]
    for name in left:
        # A name this young could be one that is being made: it counts as abandoned after ten seconds.
        _wait_for(lambda path=SHARED_MEMORY / name: time.time() - path.stat().st_ctime >= 11, 15.0)
    run_ranks(2, warm_up)
    assert not [name for name in _segments() if name.startswith(own)]
