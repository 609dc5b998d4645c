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
import torch
import torch.distributed as dist
from check import check
from devices import settle
from hooked_models import SMALL_BUCKETS, gradients_of, loss_of, new_group, perceptron, same
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

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


@check()
def memory_of_a_dropped_input_is_not_given_out_before_it_was_read() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(10):
        _late_on_one_rank()  # the others' kernels are under way, and wait for it
        gathered = torch.empty(size * LENGTH)
        work: Any = dist.all_gather_into_tensor(gathered, torch.full((LENGTH,), float(rank + turn)), async_op=True)
        _overwrite_freed_memory()
        work.wait()
        expected = torch.arange(float(size)).repeat_interleave(LENGTH) + turn
        assert torch.equal(gathered, expected), f"round {turn}"


@check()
def nobody_leaves_a_barrier_before_the_devices_have_done_what_came_before_it() -> None:
    dist.all_reduce(torch.ones(1))  # from here on the group is one of this device
    begun = torch.tensor([time.monotonic()], dtype=torch.float64)
    _late_on_one_rank()
    dist.barrier()
    left = time.monotonic()
    dist.broadcast(begun, 0)
    assert left > begun.item() + 0.01, "rank 0 keeps its device busy for longer"


@check()
def result_that_only_the_future_holds_is_whole() -> None:
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


@check(cuda_only=True)
def dropped_operations_leave_no_memory_behind() -> None:
    dist.all_reduce(torch.ones(LENGTH))
    settle()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        dist.all_reduce(torch.ones(LENGTH), async_op=True)
    settle()
    deadline = time.monotonic() + 10.0
    while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the watchdog lets go of what is done
    assert torch.cuda.memory_allocated() <= before


@check(cuda_only=True)
def training_settles_on_a_bounded_amount_of_memory() -> None:
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))), bucket_cap_mb=2)
    bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
    reserved = []
    for step in range(40):
        ddp.zero_grad()
        ddp(torch.ones(64, 512)).square().mean().backward()
        settle()
        if step > 20:
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[0]


@check(cuda_only=True)
def operation_follows_its_stream_and_any_stream_may_wait_for_it() -> None:
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


@check(
    {"gradient_allreduce": ("gradient_allreduce", {}), "bytegrad": ("bytegrad", {"hierarchical": False})},
    cuda_only=True,
)
def backward_on_a_side_stream_gives_the_same_bits(algorithm: str, options: dict[str, Any]) -> None:
    assert same(_train_on_streams(algorithm, options, True), _train_on_streams(algorithm, options, False))


def _several_groups(use_streams: bool) -> None:
    """Operations of three groups, issued in the same order by all ranks, overlap."""
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


@check()
def several_groups_do_not_disturb_each_other() -> None:
    _several_groups(False)


@check(cuda_only=True)
def several_groups_on_streams_of_their_own_do_not_disturb_each_other() -> None:
    _several_groups(True)
