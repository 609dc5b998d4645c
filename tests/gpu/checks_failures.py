# SPDX-License-Identifier: Apache-2.0
"""Peers that do not come, groups that are aborted and ranks that are killed, seen by the ranks that are left.

On CUDA tensors a call returns before it is done; wait() with a limit waits on the host and raises.
"""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from check import check, error_of, told_by_all
from devices import TIME_FACTOR, settle
from hooked_models import new_group

LENGTH = 100_003
PATIENCE = timedelta(seconds=50)
# Of busy processes, beside the time that is promised.
SLACK_SECONDS = 15.0
# Of a group whose ranks may take turns on one GPU, to come together and to act.
TIMEOUT = 3.0 * TIME_FACTOR
# From the start of the processes.
KILLED_TIMEOUT = 15.0
OPERATIONS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def _issue(operation: str, group: Any = None) -> Any:
    size = dist.get_world_size()
    tensor = torch.ones(LENGTH)
    if operation == "all_reduce":
        return dist.all_reduce(tensor, group=group, async_op=True)
    if operation == "broadcast":
        return dist.broadcast(tensor, size - 1, group=group, async_op=True)
    if operation == "all_gather_into_tensor":
        return dist.all_gather_into_tensor(torch.empty(size * LENGTH), tensor, group=group, async_op=True)
    if operation == "reduce_scatter_tensor":
        return dist.reduce_scatter_tensor(tensor, torch.ones(size * LENGTH), group=group, async_op=True)
    return dist.all_to_all_single(torch.empty(size * LENGTH), torch.ones(size * LENGTH), group=group, async_op=True)


def _fails(operation: str, group: Any = None) -> tuple[str, float]:
    """What was raised, and after how many seconds."""
    start = time.monotonic()
    message = error_of(lambda: _issue(operation, group).wait(PATIENCE))
    assert operation in message, message
    return message, time.monotonic() - start


def _the_device_still_works() -> None:
    assert (torch.ones(1000) + 1).sum().item() == 2000


def _load_nccl() -> None:
    """Seconds, which the short timeouts of other groups have no room for."""
    dist.all_reduce(torch.ones(3))
    settle()


def _last_rank_does_not_come(operation: str, used_before: bool) -> str:
    words = ""
    _load_nccl()
    with new_group(timeout=timedelta(seconds=TIMEOUT)) as group:
        if used_before:
            _issue(operation, group).wait(PATIENCE)
        else:
            dist.all_reduce(torch.ones(3), group=group)
        settle()
        told_by_all("ready")
        if dist.get_rank() != dist.get_world_size() - 1:
            message, seconds = _fails(operation, group)
            assert seconds < TIMEOUT + SLACK_SECONDS
            assert _fails("all_reduce", group)[1] < SLACK_SECONDS, "the group says so again rather than hang"
            _the_device_still_works()
            words = f"after {seconds:.1f} s: {message}"
        told_by_all("over")
        tensor = torch.ones(5)
        dist.all_reduce(tensor)  # of the other group, which is whole
        assert tensor.tolist() == [dist.get_world_size()] * 5
    return words


@check({operation: (operation,) for operation in OPERATIONS}, seconds=45)
def peer_that_does_not_come_is_an_error_at_the_timeout(operation: str) -> str:
    return _last_rank_does_not_come(operation, used_before=True)


@check(seconds=45)
def peer_that_does_not_come_to_connect_is_an_error_at_the_timeout() -> str:
    # NCCL connects for the algorithm of a longer operation when that comes, on the host.
    return _last_rank_does_not_come("all_reduce", used_before=False)


@check(seconds=25)
def abort_ends_what_is_in_flight_and_a_new_group_works() -> None:
    with new_group(timeout=timedelta(seconds=60)) as group:
        _issue("all_reduce", group).wait(PATIENCE)
        settle()
        if dist.get_rank() == 0:
            work = _issue("all_reduce", group)
            group._get_backend(torch.get_default_device()).abort()
            message = error_of(lambda: work.wait(PATIENCE))
            assert "all_reduce" in message
            assert "abort" in message
            assert "abort" in error_of(lambda: _issue("all_reduce", group))
            _the_device_still_works()
        told_by_all("aborted")
    with new_group() as fresh:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=fresh)
        assert tensor.tolist() == [dist.get_world_size()] * 3


def _of_every_size(size: int) -> Any:
    cases = {f"{operation}.{size}": (operation,) for operation in ("all_reduce", "all_gather_into_tensor")}
    return check(cases, sizes=(size,), seconds=50, group_timeout=KILLED_TIMEOUT, dying=(size - 1,))


@_of_every_size(2)
@_of_every_size(4)
def survivors_of_a_killed_rank_are_told_and_go_on_without_it(operation: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    _issue(operation).wait(PATIENCE)
    settle()
    store = dist.distributed_c10d._get_default_store()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message, seconds = _fails(operation)
    assert seconds < KILLED_TIMEOUT + SLACK_SECONDS
    _the_device_still_works()
    dist.destroy_process_group()
    survivors = dist.PrefixStore("survivors", store)
    dist.init_process_group("bagua", store=survivors, rank=rank, world_size=size - 1, timeout=timedelta(seconds=30))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size - 1] * 3
    return f"after {seconds:.1f} s: {message}"
