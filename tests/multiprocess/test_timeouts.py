# SPDX-License-Identifier: Apache-2.0
"""Timeouts of one group, and of barriers that name who is missing; tests/faults has the others."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks

TIMEOUT = 1.0
# Scheduling of three busy processes on two cores; a hang would last for the 60 s of the helper.
SLACK = 10.0
ABSENT = 2


@on_ranks(3)
def test_timeout_in_one_group_leaves_the_other_usable() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(list(range(size)), timeout=timedelta(seconds=TIMEOUT))
    if rank != size - 1:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(5), group=group)
        with pytest.raises(RuntimeError):  # the group is broken, and says so again rather than hang
            dist.all_reduce(torch.ones(5), group=group)
        backend = group._get_backend(torch.device("cpu"))
        group.abort()
        assert backend.get_error() == type(backend.get_error()).COMM_ERROR, "also after it was ended"
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 5
    dist.destroy_process_group(group)


def _error_of_barrier(limit: float) -> str:
    group: Any = dist.group.WORLD
    try:
        group.monitored_barrier(timedelta(seconds=limit))
    except RuntimeError as error:
        return str(error)
    return ""


def _barriers_around_one_that_a_rank_misses(is_late: bool) -> list[str]:
    rank = dist.get_rank()
    errors = [_error_of_barrier(20)]
    if rank == ABSENT:
        time.sleep(3 * TIMEOUT)
    if rank != ABSENT or is_late:
        started = time.monotonic()
        errors.append(_error_of_barrier(TIMEOUT if rank == 0 else 50))
        assert time.monotonic() - started < TIMEOUT + SLACK, "told at once, long before its own timeout"
    if not is_late:
        # The group goes on, with programs and with barriers.
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 3
    # Twice without a program in between.
    return [*errors, _error_of_barrier(20), _error_of_barrier(20)]


@pytest.mark.parametrize("is_late", [False, True], ids=["never", "late"])
def test_who_is_at_a_monitored_barrier_is_told_of_a_rank_that_misses_it_and_all_meet_at_the_next(is_late: bool) -> None:
    first, second, absent = run_ranks(3, _barriers_around_one_that_a_rank_misses, is_late)
    assert f"Rank {ABSENT} failed to pass monitoredBarrier" in first.pop(1)
    assert f"rank 0 has given up waiting for rank {ABSENT}" in second.pop(1)
    if is_late:
        assert f"Rank {ABSENT} came too late to monitoredBarrier" in absent.pop(1)
    assert first == second == absent == ["", "", ""]
