# SPDX-License-Identifier: Apache-2.0
"""Groups that are made after an attempt that failed, and with timeouts longer than clocks can count."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua import _fresh_store
from hooked_models import captured_stderr
from ranks import on_new_ranks, on_ranks, run_ranks

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


@on_ranks(2)
def test_a_timeout_that_is_not_positive_is_refused() -> None:
    for timeout in (timedelta(0), timedelta(seconds=-1), timedelta.max):
        with pytest.raises(ValueError, match=r"timeout of a group must be positive, got (0|-[0-9]+) ms"):
            dist.new_group(timeout=timeout)
    # Groups are counted alike on all ranks.
    group: Any = dist.new_group()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    assert ones.item() == 2


@on_new_ranks(2)
def test_waiting_for_a_rank_that_comes_late_prints_nothing() -> None:
    rank, limit = dist.get_rank(), timedelta(seconds=60)
    server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False) if rank == 0 else None
    ports = [server.port if server else 0]
    dist.broadcast_object_list(ports)
    store = server or dist.TCPStore("127.0.0.1", ports[0], None, False, limit)
    # Rank 0 looks several times before the other comes.
    _fresh_store._LOOK = timedelta(milliseconds=100)
    with captured_stderr() as said:
        if rank == 1:
            time.sleep(1)
        name = _fresh_store.new_name(store, rank, 2, limit)
        assert said() == ""
    names = ["", ""]
    dist.all_gather_object(names, name)
    assert names[0] == names[1]
