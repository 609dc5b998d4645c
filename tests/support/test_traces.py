# SPDX-License-Identifier: Apache-2.0
"""The reading of traces, on traces made by hand."""

from typing import Any

import pytest
from traces import Interval, kernels, overlap, ranges, waits_of_the_host

BACKWARD = Interval(100.0, 200.0)


def _annotation(name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin, "tid": 1}


def _call(name: str, at: float, correlation: int = 0, cat: str = "cuda_runtime") -> dict[str, Any]:
    arguments = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": 1.0, "tid": 7, "args": arguments}


def _kernel(name: str, begin: float, end: float, stream: int, correlation: int) -> dict[str, Any]:
    arguments = {"stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": arguments}


def _launched(name: str, begin: float, end: float, stream: int, *, by_host_at: float) -> list[dict[str, Any]]:
    correlation = int(10 * begin + stream)
    return [_call("cudaLaunchKernel", by_host_at, correlation), _kernel(name, begin, end, stream, correlation)]


def test_ranges_are_those_of_the_host_in_the_order_of_time() -> None:
    on_device = {**_annotation("backward", 150.0, 250.0), "cat": "gpu_user_annotation"}
    events = [_annotation("backward", 300.0, 310.0), on_device, _annotation("backward", 100.0, 200.0)]
    assert ranges([*events, _annotation("forward", 0.0, 1.0)], "backward") == [(100.0, 200.0), (300.0, 310.0)]


@pytest.mark.parametrize(
    ("name", "cat"),
    [
        ("cudaStreamSynchronize", "cuda_runtime"),
        ("cudaDeviceSynchronize", "cuda_runtime"),
        ("cudaEventSynchronize", "cuda_runtime"),
        ("cudaMemcpy", "cuda_runtime"),
        ("cuStreamSynchronize", "cuda_driver"),
        ("cuCtxSynchronize_v2", "cuda_driver"),
    ],
)
def test_calls_that_wait_for_the_device_are_found_where_they_begin(name: str, cat: str) -> None:
    events = [_call(name, at, cat=cat) for at in (99.0, 150.0, 200.0)]
    assert waits_of_the_host(events, BACKWARD) == [f"{name} on thread 7 after 50 us"]


def test_calls_that_only_enqueue_or_ask_are_no_waits() -> None:
    names = ["cudaLaunchKernel", "cudaStreamWaitEvent", "cudaEventRecord", "cudaEventQuery", "cudaMemcpyAsync"]
    assert waits_of_the_host([_call(name, 150.0) for name in names], BACKWARD) == []


def test_a_copy_to_memory_that_is_not_pinned_is_a_wait_of_the_call_that_made_it() -> None:
    def copy(kind: str, correlation: int) -> dict[str, Any]:
        return {"cat": "gpu_memcpy", "name": kind, "ts": 500.0, "dur": 1.0, "args": {"correlation": correlation}}

    events = [
        _call("cudaMemcpyAsync", 110.0, 1),
        copy("Memcpy DtoH (Device -> Pageable)", 1),
        _call("cudaMemcpyAsync", 120.0, 2),
        copy("Memcpy DtoH (Device -> Pinned)", 2),
        _call("cudaMemcpyAsync", 130.0, 3),
        copy("Memcpy DtoD (Device -> Device)", 3),
    ]
    found = waits_of_the_host(events, BACKWARD)
    assert found == ["cudaMemcpyAsync (Device -> Pageable) on thread 7 after 10 us"]


def test_kernels_of_communication_overlap_with_what_backward_computes_on_another_stream() -> None:
    events = [
        *_launched("gemm", 110.0, 130.0, 7, by_host_at=105.0),
        *_launched("gemm", 125.0, 160.0, 7, by_host_at=106.0),
        *_launched("ncclDevKernel_AllReduce", 120.0, 150.0, 20, by_host_at=107.0),
        *_launched("void bagua::minmax_uint8::cuda::encodeKernel", 155.0, 180.0, 20, by_host_at=108.0),
    ]
    found = overlap(events, [BACKWARD])
    assert found.microseconds == pytest.approx(30.0 + 5.0)
    assert found.communication_streams == {20}
    assert found.computing_streams == {7}
    assert overlap(events, [BACKWARD], "nccl").microseconds == pytest.approx(30.0)
    assert overlap(events, [BACKWARD], "bagua").microseconds == pytest.approx(5.0)


def test_kernels_of_forward_are_not_backward_even_where_they_run_late() -> None:
    events = [
        *_launched("gemm", 110.0, 150.0, 7, by_host_at=90.0),
        *_launched("ncclDevKernel_AllReduce", 110.0, 150.0, 20, by_host_at=107.0),
    ]
    assert overlap(events, [BACKWARD]).microseconds == 0.0
    assert overlap(events, [Interval(0.0, 95.0)]).microseconds == pytest.approx(40.0)


def test_communication_on_the_stream_that_computes_overlaps_with_nothing() -> None:
    events = [
        *_launched("gemm", 110.0, 130.0, 7, by_host_at=105.0),
        *_launched("ncclDevKernel_AllReduce", 130.0, 150.0, 7, by_host_at=106.0),
    ]
    found = overlap(events, [BACKWARD])
    assert found.microseconds == 0.0
    assert found.computing_streams == frozenset()


def test_what_torch_computes_for_an_algorithm_is_not_taken_for_backward() -> None:
    events = [
        *_launched("ncclDevKernel_AllReduce", 110.0, 150.0, 20, by_host_at=105.0),
        *_launched("vectorized_elementwise_kernel", 150.0, 160.0, 20, by_host_at=106.0),
        *_launched("ncclDevKernel_AllReduce", 150.0, 160.0, 21, by_host_at=107.0),
    ]
    assert overlap(events, [BACKWARD]).microseconds == 0.0


def test_kernels_are_sorted_by_their_streams() -> None:
    events = [_kernel("a", 0.0, 1.0, 7, 1), _kernel("b", 0.0, 1.0, 20, 2), _kernel("c", 0.0, 1.0, 7, 3)]
    assert {s: [k["name"] for k in all_of] for s, all_of in kernels(events).items()} == {7: ["a", "c"], 20: ["b"]}
