# SPDX-License-Identifier: Apache-2.0
"""Groups that are made after an attempt that failed, and with timeouts longer than clocks can count."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_new_ranks, on_ranks, run_ranks
from script_ranks import run_script

SIZE = 4
LATE = 3


@on_new_ranks(SIZE)
def test_a_group_is_made_on_a_store_on_which_attempts_have_failed(tmp_path: Path) -> None:
    """The default group is made on one store that outlives every attempt, of which two fail in part."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(f"{tmp_path}/store", SIZE)

    def attempt(seconds: float) -> None:
        limit = timedelta(seconds=seconds)
        dist.init_process_group("bagua", store=store, rank=rank, world_size=SIZE, timeout=limit)

    # One rank does not come; then it comes alone; then rank 0 is the one who does not.
    for absent in ([LATE], [0, 1, 2], [0]):
        if rank not in absent:
            with pytest.raises(RuntimeError, match=f"rank {absent[0]}. Check"):
                attempt(1.0)
        store.add(f"given up {absent}", 1)
        while store.add(f"given up {absent}", 0) < SIZE:
            time.sleep(0.02)
    for _ in range(2):
        attempt(30.0)
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert ones.tolist() == [SIZE] * 2
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group()


FOREVER = timedelta(days=10**6)


@pytest.mark.parametrize("transport", ["in-host", "between-hosts"])
def test_a_timeout_may_be_longer_than_clocks_can_count(transport: str, tmp_path: Path) -> None:
    env = {} if transport == "in-host" else {"BAGUA_HOST_ID": ["a", "b"]}
    run_ranks(2, _with_timeouts_of_ages, tmp_path / "store", env=env)


def _with_timeouts_of_ages(path: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(path), size)
    dist.init_process_group("bagua", store=store, rank=rank, world_size=size, timeout=FOREVER)
    group: Any = dist.new_group(timeout=FOREVER)
    sums = torch.ones(3)
    for used in (None, group):
        # The other rank comes later than a timeout that has overflowed would allow.
        if rank == 0:
            time.sleep(0.3)
        dist.all_reduce(sums, group=used)
        work: Any = dist.all_reduce(sums, group=used, async_op=True)
        work.wait(FOREVER)
        message: Any = dist.isend(sums, 1, group=used) if rank == 0 else dist.irecv(sums, 0, group=used)
        message.wait(FOREVER)
    dist.monitored_barrier(timeout=FOREVER)
    dist.distributed_c10d._set_pg_timeout(FOREVER, group)
    dist.barrier(group)
    dist.destroy_process_group()
    assert sums.tolist() == [16.0] * 3


@on_ranks("peers")
def test_a_timeout_that_is_not_positive_is_refused() -> None:
    for timeout in (timedelta(0), timedelta(seconds=-1), timedelta.max):
        with pytest.raises(ValueError, match=r"timeout of a group must be positive, got (0|-[0-9]+) ms"):
            dist.new_group(timeout=timeout)
    # Groups are counted alike on all ranks.
    group: Any = dist.new_group()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    assert ones.item() == dist.get_world_size()


_COMES_LATE = """
import os, time
from datetime import timedelta
import torch.distributed as dist
from bagua import _fresh_store

rank = int(os.environ["RANK"])
# Rank 0 looks several times before the other comes.
_fresh_store._LOOK = timedelta(milliseconds=100)
limit = timedelta(seconds=60)
if rank == 1:
    while not os.path.exists("port"):
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(open("port").read()), None, False, limit)
    store.wait(["rank 0 is about to wait"])
    time.sleep(1)
else:
    store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    open("port.part", "w").write(str(store.port))
    os.rename("port.part", "port")
    store.set("rank 0 is about to wait", "")
print("name", _fresh_store.new_name(store, rank, 2, limit), flush=True)
store.set(f"left {rank}", "")
store.wait(["left 0", "left 1"])
"""


def test_waiting_for_a_rank_that_comes_late_prints_nothing(tmp_path: Path) -> None:
    first, second = (end.output.splitlines() for end in run_script(_COMES_LATE, 2, tmp_path))
    assert first == second
    assert len(first) == 1
    assert first[0].startswith("name ")
