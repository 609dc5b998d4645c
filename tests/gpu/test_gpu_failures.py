# SPDX-License-Identifier: Apache-2.0
"""Peers that do not come, groups that are aborted and ranks that are killed, seen by the ranks that are left.

On CUDA tensors a call returns before it is done; wait() with a limit waits on the host and raises.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import TIME_FACTOR, settle
from hooked_models import new_group
from ranks import RankPool, run_ranks

pytestmark = pytest.mark.any_device

LENGTH = 100_003
PATIENCE = timedelta(seconds=50)
# Of busy processes, beside the time that is promised.
SLACK_SECONDS = 15.0
# Of a group whose ranks may take turns on one GPU, to come together and to act.
TIMEOUT = 3.0 * TIME_FACTOR
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
    with pytest.raises(RuntimeError) as caught:
        _issue(operation, group).wait(PATIENCE)
    return str(caught.value), time.monotonic() - start


def _the_device_still_works() -> None:
    assert (torch.ones(1000) + 1).sum().item() == 2000


def _load_nccl() -> None:
    """Seconds, which the short timeouts of other groups have no room for."""
    dist.all_reduce(torch.ones(3))
    settle()


def _last_rank_does_not_come(operation: str, used_before: bool) -> tuple[str, float] | None:
    found = None
    _load_nccl()
    with new_group(timeout=timedelta(seconds=TIMEOUT)) as group:
        if used_before:
            _issue(operation, group).wait(PATIENCE)
        else:
            dist.all_reduce(torch.ones(3), group=group)
        settle()
        if dist.get_rank() != dist.get_world_size() - 1:
            found = _fails(operation, group)
            assert _fails("all_reduce", group)[1] < SLACK_SECONDS, "the group says so again rather than hang"
            _the_device_still_works()
        dist.barrier()  # of the other group, which is whole
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [dist.get_world_size()] * 5
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_peer_that_does_not_come_is_an_error_at_the_timeout(peers: RankPool, operation: str) -> None:
    _assert_all_others_are_told(peers, operation, used_before=True)


def test_a_peer_that_does_not_come_to_connect_is_an_error_at_the_timeout(peers: RankPool) -> None:
    # NCCL connects for the algorithm of a longer operation when that comes, on the host.
    _assert_all_others_are_told(peers, "all_reduce", used_before=False)


def _assert_all_others_are_told(peers: RankPool, operation: str, *, used_before: bool) -> None:
    found = [result for result in peers.run(_last_rank_does_not_come, operation, used_before) if result]
    assert len(found) == peers.world_size - 1
    for message, seconds in found:
        assert operation in message
        assert seconds < TIMEOUT + SLACK_SECONDS


def _aborted_in_flight() -> str:
    with new_group(timeout=timedelta(seconds=60)) as group:
        _issue("all_reduce", group).wait(PATIENCE)
        settle()
        message = ""
        if dist.get_rank() == 0:
            work = _issue("all_reduce", group)
            group._get_backend(torch.get_default_device()).abort()
            with pytest.raises(RuntimeError) as caught:
                work.wait(PATIENCE)
            message = str(caught.value)
            with pytest.raises(dist.DistBackendError, match="abort"):
                _issue("all_reduce", group)
            _the_device_still_works()
    dist.barrier()
    with new_group() as fresh:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=fresh)
        assert tensor.tolist() == [dist.get_world_size()] * 3
    return message


def test_abort_ends_what_is_in_flight_and_a_new_group_works(peers: RankPool) -> None:
    message = peers.run(_aborted_in_flight)[0]
    assert "all_reduce" in message
    assert "abort" in message


def _killed(operation: str, folder: str) -> tuple[str, float] | None:
    rank, size = dist.get_rank(), dist.get_world_size()
    _issue(operation).wait(PATIENCE)
    settle()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = _fails(operation)
    _the_device_still_works()
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder, "survivors")), size - 1)  # type: ignore[attr-defined]
    dist.init_process_group("bagua", store=store, rank=rank, world_size=size - 1, timeout=timedelta(seconds=30))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size - 1] * 3
    return found


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather_into_tensor"])
@pytest.mark.parametrize("size", [2, 4])
def test_survivors_of_a_killed_rank_are_told_and_go_on_without_it(tmp_path: Path, size: int, operation: str) -> None:
    timeout = 10.0 * TIME_FACTOR  # from the start of the processes
    results = run_ranks(size, _killed, operation, str(tmp_path), group_timeout=timeout, dying={size - 1})
    for message, seconds in results[: size - 1]:
        assert operation in message
        assert seconds < timeout + SLACK_SECONDS
