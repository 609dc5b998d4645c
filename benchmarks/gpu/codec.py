# SPDX-License-Identifier: Apache-2.0
"""Every codec beside a copy that moves as many bytes, in turns in one run.

The copy is one device-to-device `copy_` of half of the bytes that the codec's kernels ask of the memory (see
accounting.py), since a copy reads and writes each of its own: both move the same. "of the copy" is the copy's time over
the codec's, which is the codec's bandwidth over the one that can be achieved.

Calls are timed in batches between two CUDA events, behind a delay on the stream, so that what the host takes to enqueue
them is not in it. Successive calls of a batch use other buffers, many enough not to be in the second-level cache.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import accounting
import bagua
import torch
from bagua.bench.report import size_text
from built import built
from tables import table

TARGET = 0.8
ROUNDS = 9
CHUNKS = (1, 8)
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
    def on(device: str, sizes: Sequence[int]) -> Place:
        """Return what is good for a GPU; on the CPU, what shows that everything works."""
        if device == "cpu":
            return Place(torch.device(device), (64 << 10,), 1 << 20, 1 << 20)
        return Place(torch.device(device), sizes or (1 << 20, 1 << 24, 1 << 28, 1 << 30), CACHE_BYTES, BATCH_BYTES)


@dataclass(frozen=True)
class Line:
    """Of one call: medians in seconds, and bytes."""

    codec: str
    operation: str
    dtype: str
    size: int
    chunks: int
    seconds: float
    copy_seconds: float
    bytes_moved: int

    @property
    def of_the_copy(self) -> float:
        """Bandwidth over that of the copy."""
        return self.copy_seconds / self.seconds


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


class _Case(NamedTuple):
    """What is coded: values of `elements` in all, in chunks."""

    codec: str
    dtype: torch.dtype
    elements: int
    chunks: int

    @property
    def part(self) -> int:
        return accounting.chunk_length(self.elements, self.chunks)

    def empty(self, place: Place, rows: int) -> torch.Tensor:
        packed = torch.ops.codec_operators.packed_bytes(self.codec, self.part)
        return torch.empty(rows, packed, dtype=torch.uint8, device=place.device)

    def packed(self, place: Place) -> torch.Tensor:
        packed = self.empty(place, self.chunks)
        torch.ops.codec_operators.encode(self.codec, _noise(self.elements, self.dtype, place), None, packed)
        return packed


def _encode(case: _Case, place: Place, feedback: bool = False) -> tuple[Call, int]:
    packed = case.empty(place, case.chunks)
    item = case.dtype.itemsize
    moved = accounting.encode(case.codec, case.elements, item, packed.nbytes, feedback=feedback)
    count = _buffers(moved, place)
    tensors = [_noise(case.elements, case.dtype, place) for _ in range(count)]
    residuals = [torch.zeros(case.elements, device=place.device) if feedback else None for _ in range(count)]
    encode = torch.ops.codec_operators.encode
    return lambda number: encode(case.codec, tensors[number % count], residuals[number % count], packed), moved


def _encode_with_feedback(case: _Case, place: Place) -> tuple[Call, int]:
    return _encode(case, place, feedback=True)


def _decode(case: _Case, place: Place) -> tuple[Call, int]:
    packed = case.packed(place)
    moved = accounting.decode(case.elements, case.dtype.itemsize, packed.nbytes)
    count = _buffers(moved, place)
    packets = [packed.clone() for _ in range(count)]
    outs = [torch.empty(case.elements, dtype=case.dtype, device=place.device) for _ in range(count)]
    decode = torch.ops.codec_operators.decode
    return lambda number: decode(case.codec, packets[number % count], outs[number % count]), moved


def _mean(case: _Case, place: Place) -> tuple[Call, int]:
    packed = case.packed(place)
    moved = accounting.mean(case.codec, case.part, case.dtype.itemsize, packed[0].nbytes, case.chunks)
    received = [packed.clone() for _ in range(_buffers(moved, place))]
    mean, result = torch.empty(case.part, dtype=case.dtype, device=place.device), case.empty(place, 1)[0]
    call = torch.ops.codec_operators.mean
    return lambda number: call(case.codec, received[number % len(received)], mean, result), moved


def _noise(elements: int, dtype: torch.dtype, place: Place) -> torch.Tensor:
    return torch.randn(elements, dtype=dtype, device=place.device)


OPERATIONS: dict[str, Callable[[_Case, Place], tuple[Call, int]]] = {
    "encode": _encode,
    "encode with feedback": _encode_with_feedback,
    "decode": _decode,
    "mean": _mean,
}


def _line(operation: str, case: _Case, place: Place) -> Line:
    call, moved = OPERATIONS[operation](case, place)
    copy = _copy(moved, place)
    calls = max(2, min(MOST_CALLS, place.batch_bytes // moved))
    times: dict[str, list[float]] = {"codec": [], "copy": []}
    for turn in range(-1, ROUNDS):
        for name, of in (("copy", copy), ("codec", call)):
            seconds = seconds_per_call(of, calls, place.device)
            if turn >= 0:
                times[name].append(seconds)
    return Line(
        codec=case.codec,
        operation=operation,
        dtype=str(case.dtype).removeprefix("torch."),
        size=case.elements * case.dtype.itemsize,
        chunks=case.chunks,
        seconds=statistics.median(times["codec"]),
        copy_seconds=statistics.median(times["copy"]),
        bytes_moved=moved,
    )


def lines(device: str, sizes: Sequence[int] = ()) -> Iterator[Line]:
    """Measure everything, of tensors of so many bytes."""
    torch.ops.load_library(built("libcodec_operators.so"))
    place = Place.on(device, sizes)
    cases = itertools.product(bagua.available_codecs(), DTYPES, place.sizes, CHUNKS)
    for codec, dtype, size, chunks in cases:
        for operation in OPERATIONS:
            if operation != "mean" or chunks > 1:
                yield _line(operation, _Case(codec, dtype, size // dtype.itemsize, chunks), place)


def text(measured: Sequence[Line]) -> str:
    titles = [
        "codec",
        "operation",
        "dtype",
        "tensor",
        "chunks",
        "us",
        "GB/s",
        "copy GB/s",
        "of the copy",
        "target",
    ]
    rows = [
        [
            line.codec,
            line.operation,
            line.dtype,
            size_text(line.size),
            str(line.chunks),
            f"{1e6 * line.seconds:.1f}",
            f"{line.bytes_moved / line.seconds / 1e9:.0f}",
            f"{line.bytes_moved / line.copy_seconds / 1e9:.0f}",
            f"{line.of_the_copy:.2f}",
            "met" if line.of_the_copy >= TARGET else f"below {TARGET:.0%}",
        ]
        for line in measured
    ]
    return table(titles, rows, left=4)
