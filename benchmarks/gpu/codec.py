# SPDX-License-Identifier: Apache-2.0
"""The codec beside a copy that moves as many bytes, in turns in one run.

The copy is one device-to-device `copy_` of half of the bytes that the codec's kernels ask of the memory (see
accounting.py), since a copy reads and writes each of its own: both move the same. "of the copy" is the copy's time over
the codec's, which is the codec's bandwidth over the one that can be achieved. "once" is the same with every byte of
input and output counted a single time.

Calls are timed in batches between two CUDA events, behind a delay on the stream, so that what the host takes to enqueue
them is not in it. Successive calls of a batch use other buffers, many enough not to be in the second-level cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import accounting
import bagua  # noqa: F401  (registers torch.ops.bagua)
import torch
from accounting import Bytes
from bagua.bench.report import size_text
from tables import table

TARGET = 0.8
ROUNDS = 9
CHUNKS = (1, 2, 8)
DTYPES = (torch.float32, torch.bfloat16)
# The second-level caches of the H100 and the H200 hold 50 MB, which the smallest tensors pass by as many buffers and
# calls. A batch stays below the 1024 kernels that a stream takes before it makes the host wait.
CACHE_BYTES = 512 << 20
MOST_BUFFERS = MOST_CALLS = 400
# Some ten milliseconds, in which a batch is enqueued.
DELAY_CYCLES = 30_000_000
BATCH_BYTES = 4 << 30

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Place:
    """Where to measure, and how thoroughly."""

    device: torch.device
    sizes: Sequence[int]
    cache_bytes: int
    batch_bytes: int

    @staticmethod
    def on(device: str) -> Place:
        """Return the sizes for a GPU; those for the CPU only show that everything works."""
        if device == "cpu":
            return Place(torch.device(device), (64 << 10,), 1 << 20, 1 << 20)
        return Place(torch.device(device), tuple(1 << shift for shift in range(20, 31, 2)), CACHE_BYTES, BATCH_BYTES)


@dataclass(frozen=True)
class Line:
    """Of one call: medians in seconds, and bytes."""

    operation: str
    dtype: str
    size: int
    chunks: int
    seconds: float
    copy_seconds: float
    bytes_moved: int
    bytes_once: int

    @property
    def of_the_copy(self) -> float:
        """Bandwidth over that of the copy."""
        return self.copy_seconds / self.seconds

    @property
    def once(self) -> float:
        """The same with each byte of input and output counted once."""
        return self.of_the_copy * self.bytes_once / self.bytes_moved


def seconds_per_call(call: Call, calls: int, device: torch.device) -> float:
    """Return the mean of a batch; `call` is given a number that goes up."""
    if device.type == "cpu":
        start = time.perf_counter()
        for number in range(calls):
            call(number)
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(DELAY_CYCLES)
    begin.record()
    for number in range(calls):
        call(number)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def _buffers(bytes_of_one: int, place: Place) -> int:
    return max(1, min(MOST_BUFFERS, place.cache_bytes // bytes_of_one))


def _copy(moved: int, place: Place) -> Call:
    count, half = _buffers(moved, place), moved // 2
    sources = [torch.zeros(half, dtype=torch.uint8, device=place.device) for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda number: targets[number % count].copy_(sources[number % count])


def _compress(elements: int, dtype: torch.dtype, chunks: int, place: Place) -> tuple[Call, Bytes]:
    moved = accounting.compress(elements, dtype.itemsize, chunks)
    tensors = [_noise(elements, dtype, place) for _ in range(_buffers(moved.once, place))]
    return lambda number: torch.ops.bagua.minmax_uint8_compress(tensors[number % len(tensors)], chunks), moved


def _decompress(elements: int, dtype: torch.dtype, chunks: int, place: Place) -> tuple[Call, Bytes]:
    moved = accounting.decompress(elements, dtype.itemsize, chunks)
    count = _buffers(moved.once, place)
    packed = torch.ops.bagua.minmax_uint8_compress(_noise(elements, dtype, place), chunks)
    packets = [packed.clone() for _ in range(count)]
    outs = [torch.empty(elements, dtype=dtype, device=place.device) for _ in range(count)]

    def call(number: int) -> None:
        torch.ops.bagua.minmax_uint8_decompress(packets[number % count], outs[number % count], chunks)

    return call, moved


def _reduce(elements: int, dtype: torch.dtype, copies: int, place: Place) -> tuple[Call, Bytes]:
    moved = accounting.reduce_and_compress(elements, dtype.itemsize, copies)
    part = accounting.chunk_length(elements, copies)
    packed = torch.ops.bagua.minmax_uint8_compress(_noise(part, dtype, place), 1)
    received = [packed.repeat(copies) for _ in range(_buffers(moved.once, place))]
    reduce = torch.ops.bagua.minmax_uint8_reduce_and_compress
    return lambda number: reduce(received[number % len(received)], copies, part, dtype, float(copies)), moved


def _noise(elements: int, dtype: torch.dtype, place: Place) -> torch.Tensor:
    return torch.randn(elements, dtype=dtype, device=place.device)


OPERATIONS: dict[str, Callable[[int, torch.dtype, int, Place], tuple[Call, Bytes]]] = {
    "compress": _compress,
    "decompress": _decompress,
    "reduce_and_compress": _reduce,
}


def _line(operation: str, dtype: torch.dtype, size: int, chunks: int, place: Place) -> Line:
    call, moved = OPERATIONS[operation](size // dtype.itemsize, dtype, chunks, place)
    copy = _copy(moved.moved, place)
    calls = max(2, min(MOST_CALLS, place.batch_bytes // moved.moved))
    times: dict[str, list[float]] = {"codec": [], "copy": []}
    for turn in range(-1, ROUNDS):
        for name, of in (("copy", copy), ("codec", call)):
            seconds = seconds_per_call(of, calls, place.device)
            if turn >= 0:
                times[name].append(seconds)
    return Line(
        operation=operation,
        dtype=str(dtype).removeprefix("torch."),
        size=size,
        chunks=chunks,
        seconds=statistics.median(times["codec"]),
        copy_seconds=statistics.median(times["copy"]),
        bytes_moved=moved.moved,
        bytes_once=moved.once,
    )


def lines(device: str) -> Iterator[Line]:
    """Measure everything."""
    place = Place.on(device)
    for operation in OPERATIONS:
        for dtype in DTYPES:
            for size in place.sizes:
                for chunks in CHUNKS:
                    yield _line(operation, dtype, size, chunks, place)


def text(measured: Sequence[Line]) -> str:
    """Return the table."""
    titles = ["operation", "dtype", "tensor", "chunks", "us", "GB/s", "copy GB/s", "of the copy", "once", "target"]
    rows = [
        [
            line.operation,
            line.dtype,
            size_text(line.size),
            str(line.chunks),
            f"{1e6 * line.seconds:.1f}",
            f"{line.bytes_moved / line.seconds / 1e9:.0f}",
            f"{line.bytes_moved / line.copy_seconds / 1e9:.0f}",
            f"{line.of_the_copy:.2f}",
            f"{line.once:.2f}",
            "met" if line.of_the_copy >= TARGET else f"below {TARGET:.0%}",
        ]
        for line in measured
    ]
    return table(titles, rows, left=3)
