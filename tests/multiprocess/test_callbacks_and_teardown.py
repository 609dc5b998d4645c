# SPDX-License-Identifier: Apache-2.0
"""Callbacks of futures, an operation that is refused among others, tensors that ranks store in different orders."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from holdings import wait_for
from ranks import on_ranks
from threads import bagua_threads


@on_ranks("peers")
def test_a_callback_may_wait_for_a_later_operation() -> None:
    first, second = torch.ones(5), torch.full((5,), 2.0)

    def wait_for_another(_: torch.futures.Future[Any]) -> Any:
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    done = dist.all_reduce(first, async_op=True).get_future().then(wait_for_another)
    assert float(done.wait()[0]) == 2.0 * dist.get_world_size()


@on_ranks("peers")
def test_the_future_of_a_message_has_a_named_thread_that_ends_with_it() -> None:
    rank, received = dist.get_rank(), torch.zeros(3)
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((3,), 7.0), 0)
    if rank != 0:
        return
    work: Any = dist.irecv(received, 1)
    future = work.get_future()
    assert wait_for(lambda: "bagua_message" in bagua_threads(), 20)
    dist.send(torch.ones(1), 1)
    assert torch.equal(future.wait()[0], torch.full((3,), 7.0))
    assert wait_for(lambda: "bagua_message" not in bagua_threads(), 20)


@on_ranks("peers")
def test_coalescing_works_again_after_an_operation_in_it_was_refused() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    following, preceding = (rank + 1) % size, (rank - 1) % size
    with pytest.raises(ValueError, match="contiguous"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2, 3).t(), following)])
    received = torch.zeros(4)
    send = dist.P2POp(dist.isend, torch.full((4,), float(rank)), following)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, preceding)]):
        work.wait()
    assert received[0] == preceding


@on_ranks("peers")
def test_what_follows_a_refused_operation_is_not_part_of_its_coalescing() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    following, preceding = (rank + 1) % size, (rank - 1) % size
    send = dist.P2POp(dist.isend, torch.ones(3), following)
    with pytest.raises(ValueError, match="contiguous"):
        dist.batch_isend_irecv([send, dist.P2POp(dist.isend, torch.ones(2, 3).t(), following)])
    # torch itself keeps an all_reduce back until the next batch.
    kept = torch.ones(4)
    dist.broadcast(kept, 0)
    seen = weakref.ref(kept)
    del kept
    assert wait_for(lambda: seen() is None, 20)
    received = torch.zeros(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, preceding)]):
        work.wait()
    assert torch.equal(received, torch.ones(3))


@on_ranks("peers")
def test_ranks_may_store_a_tensor_in_different_orders() -> None:
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
    assert all(map(torch.equal, listed, expected))
    assert torch.equal(flat, torch.stack(expected))
    assert torch.equal(stored, torch.stack(expected).sum(0))
