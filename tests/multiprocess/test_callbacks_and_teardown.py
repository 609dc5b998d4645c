# SPDX-License-Identifier: Apache-2.0
"""What happens beside the order of programs: callbacks of futures, dropped handles, aborts, groups left half made."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hooked_models import Gradients, loss_of, new_group, perceptron, same, train
from ranks import RankPool
from threads import bagua_threads
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def _wait_inside_a_callback() -> float:
    first, second = torch.ones(5), torch.full((5,), 2.0)

    def wait_for_another(_: torch.futures.Future[Any]) -> Any:
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    done = dist.all_reduce(first, async_op=True).get_future().then(wait_for_another)
    return float(done.wait()[0])


def test_a_callback_may_wait_for_a_later_operation(peers: RankPool) -> None:
    results = peers.run(_wait_inside_a_callback)
    assert results == [2.0 * peers.world_size] * peers.world_size


def _threads_become(is_right: Callable[[list[str]], bool]) -> bool:
    end = time.monotonic() + 20
    while not (found := is_right(bagua_threads())) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _future_of_a_message() -> bool:
    rank, received = dist.get_rank(), torch.zeros(3)
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((3,), 7.0), 0)
    if rank != 0:
        return True
    work: Any = dist.irecv(received, 1)
    future = work.get_future()
    has_thread = _threads_become(lambda names: "bagua_message" in names)
    dist.send(torch.ones(1), 1)
    assert torch.equal(future.wait()[0], torch.full((3,), 7.0))
    return has_thread and _threads_become(lambda names: "bagua_message" not in names)


def test_the_future_of_a_message_has_a_named_thread_that_ends_with_it(peers: RankPool) -> None:
    assert all(peers.run(_future_of_a_message))


def _train_with_power_sgd() -> list[Gradients]:
    def register(ddp: DDP) -> None:
        state = PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        ddp.register_comm_hook(state, powerSGD_hook)

    return train(perceptron(), register, steps=5, loss=loss_of)


def test_torch_s_power_sgd_hook_trains_over_bagua(peers: RankPool) -> None:
    histories = peers.run(_train_with_power_sgd)
    assert all(same(history, histories[0]) for history in histories)


def _drop_everything_unwaited() -> bool:
    for _ in range(50):
        with new_group() as group:
            for _ in range(3):
                dist.all_reduce(torch.ones(100), group=group, async_op=True)
    return True


@pytest.mark.long
def test_handles_and_groups_may_be_dropped_with_work_in_flight(peers: RankPool) -> None:
    assert all(peers.run(_drop_everything_unwaited))


def _coalesce_again_after_a_mistake() -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    following, preceding = (rank + 1) % size, (rank - 1) % size
    with pytest.raises(ValueError, match="contiguous"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2, 3).t(), following)])
    received = torch.zeros(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), following),
            dist.P2POp(dist.irecv, received, preceding),
        ]
    )
    for work in works:
        work.wait()
    return float(received[0]) - preceding


def test_coalescing_works_again_after_an_operation_in_it_was_refused(peers: RankPool) -> None:
    assert peers.run(_coalesce_again_after_a_mistake) == [0.0] * peers.world_size


def _gather_channels_last() -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = torch.arange(48.0).view(2, 4, 2, 3) + rank
    # Every other rank stores the same tensor in another order.
    stored = plain.to(memory_format=torch.channels_last) if rank % 2 else plain.clone()
    listed = [torch.empty_like(plain) for _ in range(size)]
    dist.all_gather(listed, stored)
    flat = torch.empty(size, *plain.shape)
    dist.all_gather_into_tensor(flat, stored)
    dist.all_reduce(stored)
    expected = [torch.arange(48.0).view(2, 4, 2, 3) + peer for peer in range(size)]
    return (
        all(map(torch.equal, listed, expected))
        and torch.equal(flat, torch.stack(expected))
        and torch.equal(stored, torch.stack(expected).sum(0))
    )


def test_ranks_may_store_a_tensor_in_different_orders(peers: RankPool) -> None:
    assert all(peers.run(_gather_channels_last))


def _abort_while_waiting() -> list[str]:
    """Rank 0 waits for a message and for a collective that never come; another thread aborts the group."""
    messages: list[str] = []
    with new_group(timeout=timedelta(seconds=60)) as group:
        if dist.get_rank() == 0:
            received = dist.irecv(torch.zeros(3), 1, group=group)
            reduced = dist.all_reduce(torch.zeros(3), group=group, async_op=True)
            assert received is not None
            assert reduced is not None
            backend = group._get_backend(torch.device("cpu"))
            # Before this thread waits or while it does: both are under way.
            aborter = threading.Thread(target=backend.abort)
            aborter.start()
            for work in (received, reduced):
                with pytest.raises(dist.DistBackendError) as error:
                    work.wait()
                messages.append(str(error.value))
            aborter.join()
            with pytest.raises(dist.DistBackendError, match="aborted"):
                dist.all_reduce(torch.zeros(3), group=group)
    dist.barrier()
    return messages


def test_abort_releases_those_who_wait_and_says_which_operation(rank_pools: dict[int, RankPool]) -> None:
    received, reduced = rank_pools[2].run(_abort_while_waiting)[0]
    assert "bagua:recv" in received
    assert "rank 0 of 2" in received
    assert "bagua:all_reduce #0" in reduced
    assert "aborted" in reduced
