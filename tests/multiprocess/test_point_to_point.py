# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks."""

import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from holdings import resident_bytes
from ranks import on_ranks, run_ranks
from reference import DTYPES, values

pytestmark = pytest.mark.any_device


@on_ranks("peers")
def test_send_between_every_two_ranks() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = itertools.permutations(range(size), 2)
    for dtype, (source, destination), shape in itertools.product(DTYPES, pairs, [(3, 7), (0,)]):
        message = values(dtype, shape, size * source + destination)
        if rank == source:
            dist.send(message, destination)
        elif rank == destination:
            received = torch.empty_like(message)
            assert dist.recv(received, source) == source
            assert torch.equal(received, message)


@pytest.mark.cpu_only("NCCL communicators of pairs are made one after another, a ring of them has to be a batch")
@on_ranks("peers")
def test_pending_receive_holds_up_no_later_operation() -> None:
    """A pending receive holds up neither a collective nor a send that is issued after it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(5)
    pending: Any = dist.irecv(received, (rank - 1) % size)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3
    dist.send(torch.full((5,), float(rank)), (rank + 1) % size)
    pending.wait()
    assert (received == (rank - 1) % size).all()


@pytest.mark.cpu_only("NCCL receives from a named rank")
@on_ranks("peers")
def test_receive_from_anyone_tells_the_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in (1, 0):
        if rank != 0:
            dist.send(torch.full((length,), rank), 0)
        else:
            sources = set()
            for _ in range(size - 1):
                received = torch.zeros(length, dtype=torch.int64)
                source = dist.recv(received)
                assert (received == source).all()
                sources.add(source)
            assert sources == set(range(1, size))
        dist.barrier()


@pytest.mark.cpu_only("NCCL sends that face each other have to be a batch")
@on_ranks(2)
def test_two_ranks_exchange_large_messages() -> None:
    """Both sides send first: neither may wait for the other's receive."""
    rank, numbers = dist.get_rank(), torch.arange(1_000_003)  # 8 MB, of which half may come unasked
    message, received = numbers + rank, torch.empty_like(numbers)
    sending: Any = dist.isend(message, 1 - rank)
    dist.recv(received, 1 - rank)
    sending.wait()
    assert torch.equal(received, numbers + 1 - rank)


def _send_to_a_rank_that_receives_later() -> int:
    """How many MiB the receiver has taken before it asks for any of 150 MiB."""
    rank, count = dist.get_rank(), 50
    message = torch.zeros(3 << 18)
    dist.barrier()
    if rank == 0:
        for i in range(count):
            dist.send(message.fill_(i), 1)
        return 0
    before = resident_bytes()
    time.sleep(1)
    taken = (resident_bytes() - before) >> 20
    for i in range(count):
        dist.recv(message, 0)
        assert (message == i).all()
    return taken


@pytest.mark.cpu_only("NCCL sends wait for their receives")
@pytest.mark.parametrize("hosts", [1, 2])
def test_what_comes_before_its_receive_takes_a_bounded_part_of_memory(hosts: int) -> None:
    env = {"BAGUA_HOST_ID": [f"host {rank % hosts}" for rank in range(2)]}
    # 16 MiB may come. Memory grows in steps, and the transport itself takes some.
    assert max(run_ranks(2, _send_to_a_rank_that_receives_later, env=env)) < 48


@pytest.mark.cpu_only("NCCL has no tags")
@on_ranks(2)
def test_many_messages_ahead_of_their_receives_arrive_in_any_order_of_these() -> None:
    """More than may come unasked, with many tags, received in another order than sent and some from anybody."""
    tags, of_each, size = 40, 25, 8000
    if dist.get_rank() == 0:
        works: list[Any] = [
            dist.isend(torch.full((size,), tag * of_each + i, dtype=torch.int32), 1, tag=tag)
            for i in range(of_each)
            for tag in range(tags)
        ]
        for work in works:
            work.wait()
    else:
        received = torch.empty(size, dtype=torch.int32)
        for tag in reversed(range(tags)):
            for i in range(of_each):
                assert dist.recv(received, None if tag % 3 == 0 else 0, tag=tag) == 0
                assert (received == tag * of_each + i).all()
    dist.barrier()


@pytest.mark.cpu_only("NCCL sends that face each other have to be a batch")
@on_ranks("peers")
def test_collectives_pass_messages_that_wait_for_their_receives() -> None:
    """Programs work while more messages wait for their receives than may come unasked."""
    rank, size = dist.get_rank(), dist.get_world_size()
    message = torch.full((1 << 20,), float(rank))
    works: list[Any] = [dist.isend(message, peer) for peer in range(size) if peer != rank for _ in range(5)]
    for numel in (3, 1 << 16, 1 << 21):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        assert (tensor == size).all()
        dist.barrier()
    for peer in range(size):
        for _ in range(5 if peer != rank else 0):
            received = torch.empty_like(message)
            dist.recv(received, peer)
            assert (received == peer).all()
    for work in works:
        work.wait()


def _segments_after_large_messages() -> int:
    """How much memory this process shares with others after a message each way that is long enough for it."""
    message, received = torch.ones(1 << 18), torch.empty(1 << 18)
    for _ in range(2):
        works: list[Any] = [dist.isend(message, 1 - dist.get_rank()), dist.irecv(received, 1 - dist.get_rank())]
        for work in works:
            work.wait()
        assert torch.equal(received, message)
        dist.barrier()
    return len(set(re.findall(r"/dev/shm/bagua-\S+", Path("/proc/self/maps").read_text())))


@pytest.mark.cpu_only("NCCL has memory of its own")
def test_messages_of_one_host_take_the_network_where_shared_memory_is_off() -> None:
    assert min(run_ranks(2, _segments_after_large_messages)) > 0
    assert run_ranks(2, _segments_after_large_messages, env={"BAGUA_SHARED_MEMORY": "0"}) == [0, 0]
    # Where one rank has it off, the other one has made memory that nobody opens.
    assert run_ranks(2, _segments_after_large_messages, env={"BAGUA_SHARED_MEMORY": ["0", "1"]}) == [0, 1]
