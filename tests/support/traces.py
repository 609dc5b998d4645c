# SPDX-License-Identifier: Apache-2.0
"""What a trace of torch.profiler says about streams and about the host: functions of the events of a Chrome trace.

Times are microseconds, as in the trace. Begin and end of what is looked at are those of `record_function` ranges.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Event = Mapping[str, Any]

# Calls that return when the device has come as far. Both interfaces of CUDA have them.
_WAITING_CALLS = frozenset(
    f"{prefix}{name}"
    for prefix in ("cuda", "cu")
    for name in ("StreamSynchronize", "DeviceSynchronize", "CtxSynchronize", "EventSynchronize")
) | {"cudaMemcpy"}
_CALLS = ("cuda_runtime", "cuda_driver")
# Memory that is not pinned: the host waits until it has been written.
_BLOCKING_COPY = "Device -> Pageable"
# Kernels of NCCL and of the codec (which lives in namespace bagua).
_OF_COMMUNICATION = ("nccl", "bagua")


class Interval(NamedTuple):
    """From, to."""

    begin: float
    end: float


def _interval(event: Event) -> Interval:
    return Interval(float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))


def ranges(events: Iterable[Event], name: str) -> list[Interval]:
    """When the host was in `record_function(name)`, in the order of time."""
    return sorted(
        _interval(event) for event in events if event.get("cat") == "user_annotation" and event.get("name") == name
    )


def waits_of_the_host(events: Sequence[Event], window: Interval) -> list[str]:
    """What made a thread of the host wait for the device and began within the window: name, thread and time of each."""
    copies = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") == "gpu_memcpy" and _BLOCKING_COPY in str(event.get("name"))
    }
    found = []
    for event in events:
        if event.get("cat") not in _CALLS or not window.begin <= float(event["ts"]) < window.end:
            continue
        is_blocking_copy = event.get("args", {}).get("correlation") in copies
        # The driver's call has a suffix where it is one of several versions.
        name = str(event["name"]).removesuffix("_v2").removesuffix("_ptsz")
        if name in _WAITING_CALLS or is_blocking_copy:
            what = f"{event['name']} ({_BLOCKING_COPY})" if is_blocking_copy else str(event["name"])
            found.append(f"{what} on thread {event.get('tid')} after {float(event['ts']) - window.begin:.0f} us")
    return found


def kernels(events: Iterable[Event]) -> dict[int, list[Event]]:
    """By stream."""
    found: dict[int, list[Event]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            found.setdefault(int(event["args"]["stream"]), []).append(event)
    return found


def is_of_communication(kernel: Event) -> bool:
    """Whether it is a kernel of NCCL or of the codec."""
    return any(part in str(kernel["name"]) for part in _OF_COMMUNICATION)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for interval in sorted(intervals):
        if merged and interval.begin <= merged[-1].end:
            merged[-1] = Interval(merged[-1].begin, max(merged[-1].end, interval.end))
        else:
            merged.append(interval)
    return merged


def _common(one: Iterable[Interval], other: Iterable[Interval]) -> float:
    """The time that both unions have in common."""
    others = _union(other)
    return sum(
        max(0.0, min(a.end, b.end) - max(a.begin, b.begin))  # neither overlaps itself, so nothing is counted twice
        for a in _union(one)
        for b in others
    )


class Overlap(NamedTuple):
    """Of communication with computation on other streams."""

    microseconds: float
    communication_streams: frozenset[int]
    computing_streams: frozenset[int]


def overlap(events: Sequence[Event], launched_in: Sequence[Interval], what: str = "") -> Overlap:
    """How long kernels of communication ran beside kernels that compute and that the host launched in these intervals.

    `what`: only communication whose kernels have this in their name. A stream with a kernel of communication on it is
    one of communication, and so are the kernels that the algorithms take from torch there.
    """
    by_stream = kernels(events)
    of_communication = {stream for stream, all_of in by_stream.items() if any(map(is_of_communication, all_of))}
    launches = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }

    def is_launched_there(kernel: Event) -> bool:
        launched = launches.get(kernel["args"].get("correlation"))
        return launched is not None and any(window.begin <= launched < window.end for window in launched_in)

    computing = {
        stream: [kernel for kernel in all_of if is_launched_there(kernel)]
        for stream, all_of in by_stream.items()
        if stream not in of_communication
    }
    communicating = [
        kernel
        for stream in of_communication
        for kernel in by_stream[stream]
        if is_of_communication(kernel) and what in str(kernel["name"])
    ]
    microseconds = _common(
        map(_interval, communicating), (_interval(kernel) for all_of in computing.values() for kernel in all_of)
    )
    return Overlap(
        microseconds,
        frozenset(of_communication),
        frozenset(stream for stream, all_of in computing.items() if all_of),
    )
