# SPDX-License-Identifier: Apache-2.0
"""Times what was asked for, on every rank; rank 0 gets the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import bagua
from bagua._native import _C
from bagua._tensors_apart import gathered
from bagua.bench.collectives import COLLECTIVES, Collective, Place
from bagua.bench.options import Settings, options_of
from bagua.bench.training_step import TrainingStep, algorithm
from bagua.info.connections import Line, connections, line_between, together

# Ranks leave a barrier some 10 us apart, more than the fastest calls last, hence many of those to an iteration. Gloo's
# take 0.4 ms mostly and now and then several, hence so long.
_SHORTEST_ITERATION = 0.01  # seconds
_MOST_CALLS = 4096


_Case = Collective | TrainingStep


@dataclass(frozen=True)
class Times:
    """Seconds of one call, each that of the slowest rank."""

    minimum: float
    median: float
    maximum: float

    @staticmethod
    def of(seconds: list[float]) -> Times:
        return Times(min(seconds), statistics.median(seconds), max(seconds))


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    test: str
    size: int
    dtype: str
    count: int
    seconds: Times
    algbw: float
    busbw: float
    wire_bytes: float | None
    check: str | None
    vs: Times | None
    vs_missing: str | None
    # What the kernel saw of the line meanwhile, on all ranks; None: all ranks are on one host.
    line: Line | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as long the other backend takes."""
        return None if self.vs is None else self.vs.median / self.seconds.median

    def to_json(self) -> dict[str, Any]:
        """Return all figures in units of bytes and seconds."""
        return {**asdict(self), "ratio": self.ratio}


class Measurement:
    """All tests at all sizes. Every rank goes through them in the same order."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._hosts = len(set(gathered(_C.local_host_id())))
        self._device = device
        world = dist.group.WORLD
        assert world is not None
        self._world = world
        other = dist.new_group(backend=settings.vs) if settings.vs else None
        assert other is None or isinstance(other, dist.ProcessGroup)
        self._other = other
        self._cases = [
            (test, dtype, size)
            for test in settings.tests
            for dtype in (settings.dtypes if test != "barrier" else settings.dtypes[:1])
            for size in (settings.sizes if test != "barrier" and settings.shapes is None else (0,))
        ]

    def results(self) -> Iterator[Result]:
        """Yield one result after another. Collective."""
        for case in self._cases:
            yield self._result(*case)

    def _make(self, test: str) -> tuple[Callable[[Place], _Case], Callable[[Place], _Case]]:
        """Return what makes the test, and what makes its like on another backend."""
        if test in COLLECTIVES:
            return COLLECTIVES[test], COLLECTIVES[test]
        shapes = self._settings.shapes
        ours = algorithm(test, options_of(test, self._settings.options), shapes)
        return ours, lambda place: TrainingStep(place, shapes=shapes)

    def _result(self, test: str, dtype: str, size: int) -> Result:
        ranks = dist.get_world_size()
        kind = getattr(torch, dtype)
        if self._settings.shapes is not None:
            count = self._settings.shapes.elements
        else:
            # As in nccl-tests, every rank has a part of the same size.
            count = max(size // kind.itemsize // ranks, 1) * ranks if size else 0
        ours, others = self._make(test)
        case = ours(Place(self._world, self._device, kind, count))
        other, missing = self._rival(others, kind, count)
        # A check of algorithms on weights needs their whole way, that of a collective spares a useless measurement.
        check = case.check() if self._settings.is_checked and isinstance(case, Collective) else ""
        sent_before = _sent(case)
        times, line = self._times([case, *([other] if other else [])])
        sent = _sent(case)
        wire_bytes = None
        if sent is not None and sent_before is not None:
            steps = self._settings.warmup + self._settings.iterations
            wire_bytes = statistics.mean(gathered((sent - sent_before) / steps))
        if self._settings.is_checked and isinstance(case, TrainingStep):
            check = case.check()
        if isinstance(case, TrainingStep):
            case.close()
        seconds = Times.of(times[0])
        size = count * kind.itemsize
        return Result(
            test=test,
            size=size,
            dtype=dtype if count else "",
            count=count,
            seconds=seconds,
            algbw=size / seconds.median,
            busbw=size / seconds.median * case.bus_factor(ranks),
            wire_bytes=wire_bytes,
            check=self._first_wrong(check) if self._settings.is_checked else None,
            vs=Times.of(times[1]) if other else None,
            vs_missing=missing,
            line=line if self._hosts > 1 else None,
        )

    def _rival(self, make: Callable[[Place], _Case], dtype: torch.dtype, count: int) -> tuple[_Case | None, str | None]:
        """Return the same on the other backend, or why that does not have it."""
        if self._other is None:
            return None, None
        try:
            case = make(Place(self._other, self._device, dtype, count))
            case.step()
        except (RuntimeError, ValueError, TypeError) as error:  # found out before anything is sent, on all ranks
            return None, str(error).splitlines()[0]
        return case, None

    def _times(self, cases: list[_Case]) -> tuple[list[list[float]], Line]:
        """Return the seconds of each case's iterations, taken in turn, each from a common start to the last rank.

        And what the kernels saw during those of the first case.
        """
        warmup, iterations = self._settings.warmup, self._settings.iterations
        seconds = torch.zeros(len(cases), iterations, dtype=torch.float64)
        calls = [1] * len(cases)
        lines: list[Line] = []
        for iteration in range(-warmup, iterations):
            if iteration == 0:
                calls = [self._calls_of_an_iteration(case) for case in cases]
            for index, case in enumerate(cases):
                before = connections()
                taken = self._seconds(case, calls[index])
                if iteration < 0:
                    continue
                seconds[index, iteration] = taken / calls[index]
                if index == 0:
                    lines.append(line_between(before, connections()))
        return self._of_the_slowest_rank(seconds).tolist(), together(gathered(together(lines)))

    def _seconds(self, case: _Case, calls: int) -> float:
        """Return how long this rank takes for `calls` calls, one after another."""
        dist.barrier()
        self._synchronise()
        begin = time.perf_counter()
        for _ in range(calls):
            case.step()
        self._synchronise()
        return time.perf_counter() - begin

    def _calls_of_an_iteration(self, case: _Case) -> int:
        """Return the same number on all ranks. Collective."""
        calls = 1
        while isinstance(case, Collective) and calls < _MOST_CALLS:
            # The least of several: a single call that took long must not make all iterations short.
            taken = torch.tensor([self._seconds(case, calls) for _ in range(3)], dtype=torch.float64)
            if self._of_the_slowest_rank(taken).min().item() >= _SHORTEST_ITERATION:
                break
            calls *= 2
        return calls

    def _of_the_slowest_rank(self, seconds: torch.Tensor) -> torch.Tensor:
        seconds = seconds.to(self._device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds

    def _synchronise(self) -> None:
        # With the stream that all cases wait on, not with the device: of "async" a rank may have begun a round that
        # another joins in its next step, before which that one waits for this rank at the barrier.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _first_wrong(self, own: str) -> str:
        return next((f"rank {rank}: {wrong}" for rank, wrong in enumerate(gathered(own)) if wrong), "")


def _sent(case: _Case) -> int | None:
    return case.wire_bytes() if isinstance(case, TrainingStep) else None


def environment(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return what figures depend on. Collective."""
    hosts = gathered(_C.local_host_id())
    return {
        "bagua": bagua.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": len(hosts),
        "hosts": len(set(hosts)),
        "network": str(settings.network) if settings.network else None,
        "is_encrypted": bool(_C.job_secret_fingerprint()),
        "threads": torch.get_num_threads(),
        "vs": settings.vs,
        "options": settings.options,
        "model": settings.shapes.name if settings.shapes else None,
        "compute": settings.shapes.compute if settings.shapes else None,
        "iterations": settings.iterations,
        "warmup": settings.warmup,
    }
