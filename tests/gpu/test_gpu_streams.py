# SPDX-License-Identifier: Apache-2.0
"""Streams of the user's, and tensors that go back to the allocator while communication runs.

What has no streams in it runs on the CPU, too: there a freed tensor's memory is given out again just as well.
"""

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import settle
from hooked_models import SMALL_BUCKETS, gradients_of, loss_of, new_group, perceptron, same
from ranks import RankPool
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

LENGTH = 1 << 18
# Tens of milliseconds on any GPU: far longer than the enqueueing of what has to wait for them.
CYCLES = 50_000_000


def _delay() -> None:
    """Keeps the current stream busy, so that what was enqueued without waiting for it comes too early."""
    if torch.get_default_device().type == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(0.02)


def _late_on_one_rank() -> None:
    if dist.get_rank() == 0:
        _delay()


def _overwrite_freed_memory() -> None:
    """Takes blocks of the size that was freed, and fills them."""
    junk = [torch.full((LENGTH,), -1.0) for _ in range(4)]
    del junk


def _inputs_dropped_at_once(rounds: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(rounds):
        _late_on_one_rank()  # the others' kernels are under way, and wait for it
        gathered = torch.empty(size * LENGTH)
        work: Any = dist.all_gather_into_tensor(gathered, torch.full((LENGTH,), float(rank + turn)), async_op=True)
        _overwrite_freed_memory()
        work.wait()
        expected = torch.arange(float(size)).repeat_interleave(LENGTH) + turn
        assert torch.equal(gathered, expected), f"round {turn}"


def test_the_memory_of_a_dropped_input_is_not_given_out_before_it_was_read(peers: RankPool) -> None:
    peers.run(_inputs_dropped_at_once, 10)


def _times_at_a_barrier() -> tuple[float, float]:
    """When this rank had begun what its device does, and when it left the barrier behind it."""
    dist.all_reduce(torch.ones(1))  # from here on the group is one of this device
    begun = time.monotonic()
    _late_on_one_rank()
    dist.barrier()
    return begun, time.monotonic()


def test_nobody_leaves_a_barrier_before_the_devices_have_done_what_came_before_it(peers: RankPool) -> None:
    times = peers.run(_times_at_a_barrier)
    late = times[0][0] + 0.01  # rank 0 keeps its device busy for longer
    assert all(left > late for _, left in times)


def _results_of_future_only() -> None:
    """Nobody calls wait() on the work, as under DDP."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(10):
        _late_on_one_rank()
        tensor = torch.full((LENGTH,), float(rank + turn))
        future = dist.all_reduce(tensor, async_op=True).get_future()
        del tensor
        _overwrite_freed_memory()
        (result,) = future.wait()
        assert (result == size * (size - 1) / 2 + size * turn).all()


def test_a_result_that_only_the_future_holds_is_whole(peers: RankPool) -> None:
    peers.run(_results_of_future_only)


def _device_memory() -> int:
    return torch.cuda.memory_allocated()


def _nothing_is_kept() -> tuple[int, int, int]:
    """Bytes before, bytes after many dropped operations, and the most that were reserved for them."""
    dist.all_reduce(torch.ones(LENGTH))
    settle()
    gc.collect()
    before = _device_memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(300):
        dist.all_reduce(torch.ones(LENGTH), async_op=True)
    settle()
    deadline = time.monotonic() + 10.0
    while _device_memory() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the watchdog lets go of what is done
    return before, _device_memory(), torch.cuda.max_memory_allocated() - before


@pytest.mark.cuda_only
def test_dropped_operations_leave_no_memory_behind(peers: RankPool) -> None:
    for before, after, _ in peers.run(_nothing_is_kept):
        assert after <= before


def _training_reserves_no_more() -> list[int]:
    """Reserved bytes after each step but the first two, in which DDP rebuilds its buckets."""
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))), bucket_cap_mb=2)
    bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
    reserved = []
    for step in range(40):
        ddp.zero_grad()
        ddp(torch.ones(64, 512)).square().mean().backward()
        settle()
        if step > 20:
            reserved.append(torch.cuda.memory_reserved())
    return reserved


@pytest.mark.cuda_only
def test_training_settles_on_a_bounded_amount_of_memory(peers: RankPool) -> None:
    for reserved in peers.run(_training_reserves_no_more):
        assert reserved[-1] == reserved[0]


def _on_a_side_stream() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    side, reader = torch.cuda.Stream(), torch.cuda.Stream()
    total = size * (size + 1) / 2
    for _ in range(5):
        with torch.cuda.stream(side):
            _delay()
            tensor = torch.full((LENGTH,), float(rank + 1))
            work: Any = dist.all_reduce(tensor, async_op=True)
        # Another stream than the one that issued it waits, and reads.
        with torch.cuda.stream(reader):
            work.wait()
            seen = tensor.clone()
        tensor.record_stream(reader)
        reader.synchronize()
        assert (seen == total).all()
        with torch.cuda.stream(side):
            dist.all_reduce(tensor)
            doubled = tensor * 2
        side.synchronize()
        assert (doubled == 2 * size * total).all()


@pytest.mark.cuda_only
def test_an_operation_follows_its_stream_and_any_stream_may_wait_for_it(peers: RankPool) -> None:
    peers.run(_on_a_side_stream)


@contextlib.contextmanager
def _stream(use: bool) -> Iterator[None]:
    if not use:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def _train_on_streams(algorithm: str, options: dict[str, Any], side: bool) -> list[dict[str, Tensor | None]]:
    history = []
    with _stream(side):
        ddp = DDP(perceptron(), **SMALL_BUCKETS)
        bagua.register_comm_hook(ddp, algorithm, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            _late_on_one_rank()
            loss_of(ddp, step).backward()
            history.append(gradients_of(ddp))
            optimizer.step()
    return history


def _both_streams(algorithm: str, options: dict[str, Any]) -> bool:
    return same(_train_on_streams(algorithm, options, True), _train_on_streams(algorithm, options, False))


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("algorithm", "options"), [("gradient_allreduce", {}), ("bytegrad", {"hierarchical": False})], ids=str
)
def test_backward_on_a_side_stream_gives_the_same_bits(
    peers: RankPool, algorithm: str, options: dict[str, Any]
) -> None:
    assert all(peers.run(_both_streams, algorithm, options))


def _several_groups(use_streams: bool) -> None:
    """Operations of three groups, issued in the same order by all ranks, overlap and do not disturb each other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    streams = [torch.cuda.Stream() if use_streams else None for _ in range(3)]
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(new_group()) for _ in range(3)]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        pending: list[tuple[Any, Tensor, float]] = []
        for turn in range(30):
            which = turn % 3
            stream = streams[which]
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                if turn % 5 == 0:
                    _late_on_one_rank()
                tensor = torch.full((1000 * (which + 1),), float(rank + turn))
                work = dist.all_reduce(tensor, group=groups[which], async_op=True)
                pending.append((work, tensor, size * (size - 1) / 2 + size * turn))
        for work, tensor, expected in reversed(pending):
            work.wait()
            assert (tensor == expected).all()
        settle()


def test_several_groups_do_not_disturb_each_other(peers: RankPool) -> None:
    peers.run(_several_groups, False)


@pytest.mark.cuda_only
def test_several_groups_on_streams_of_their_own_do_not_disturb_each_other(peers: RankPool) -> None:
    peers.run(_several_groups, True)


def _two_models_on_two_groups() -> bool:
    alone = _train_on_streams("bytegrad", {"hierarchical": False}, False)
    with new_group() as first, new_group() as second:
        models = [DDP(perceptron(), process_group=group, **SMALL_BUCKETS) for group in (first, second)]
        for model in models:
            bagua.register_comm_hook(model, "bytegrad", hierarchical=False)
        found = []
        for model in models:
            loss_of(model, 0).backward()
            found.append(gradients_of(model))
        return all(same(gradients, alone[0]) for gradients in found)


def test_models_on_groups_of_their_own_have_the_gradients_that_they_have_alone(peers: RankPool) -> None:
    assert all(peers.run(_two_models_on_two_groups))
