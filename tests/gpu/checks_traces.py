# SPDX-License-Identifier: Apache-2.0
"""Traces of training steps: the host waits for no device before the optimizer's step, and communication overlaps.

On the CPU the same steps are traced, and only that the parts of a step are found in the trace is checked.
"""

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import bagua
import torch
import torch.distributed as dist
from check import check
from devices import randn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function
from traces import Event, Interval, overlap, ranges, waits_of_the_host

# DDP times its own first ten steps, and qadam ends its warm-up.
WARM_UP = 12
STEPS = 3
WIDTH = 1024
LAYERS = 8
# A backward of some milliseconds on a GPU.
BATCH = {"cpu": 4, "cuda": 8192}

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", {"hierarchical": False}),
    "quantized_allreduce": ("quantized_allreduce", {"hierarchical": False, "exact": ()}),
    "powersgd": ("powersgd", {"start_step": 2}),
    "qadam": ("qadam", {"hierarchical": False}),
    "decentralized": ("decentralized", {"hierarchical": False}),
    "low_precision_decentralized": ("low_precision_decentralized", {"hierarchical": False}),
    "async": ("async", {"sync_interval_ms": 1}),
}
# Kernels that have to run beside backward: gradients travel as soon as a bucket is full, weights from before forward
# on. Not those of low_precision_decentralized, which exchanges after the step, nor those of async, when it likes.
OVERLAPPING = [
    ("gradient_allreduce", "nccl"),
    ("bytegrad", "nccl"),
    ("bytegrad", "bagua"),
    ("qadam", "nccl"),
    ("qadam", "bagua"),
    ("decentralized", "nccl"),
]


def _model() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _wait_in_the_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    bucket.buffer().sum().item()
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def _settle_this_stream() -> None:
    # Not the device: a background round may be waiting for a rank that has not begun its next step.
    if torch.get_default_device().type == "cuda":
        torch.cuda.current_stream().synchronize()


def _trace(name: str, step: Any) -> list[Event]:
    """Kept, by the first rank, where BAGUA_TRACES names a folder."""
    for _ in range(WARM_UP):
        step()
    _settle_this_stream()
    activities = [ProfilerActivity.CPU]
    if torch.get_default_device().type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        for _ in range(STEPS):
            step()
        _settle_this_stream()
    file = Path(os.environ.get("BAGUA_TRACES", tempfile.gettempdir()), f"trace-{name}-{os.getpid()}.json")
    profiled.export_chrome_trace(str(file))
    content = file.read_bytes()
    file.unlink()
    if "BAGUA_TRACES" in os.environ and dist.get_rank() == 0:
        file.with_suffix(".json.gz").write_bytes(gzip.compress(content, 6))
    events: list[Event] = json.loads(content)["traceEvents"]
    return events


def _traced(algorithm: str, options: dict[str, Any]) -> tuple[list[Event], list[Interval], list[str]]:
    """The events of some steps, when their backwards were, and where the host waited for the device."""
    model = _model()
    # A bucket for each layer.
    ddp = DDP(model, bucket_cap_mb=4, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if algorithm == "qadam":
        optimizer = bagua.QAdamOptimizer(model.parameters(), lr=1e-4, warmup_steps=2)
    handle: Any = None
    if algorithm == "a hook that waits":
        ddp.register_comm_hook(None, _wait_in_the_hook)
    else:
        handle = bagua.register_comm_hook(ddp, algorithm, optimizer, **options)
    batch = randn(BATCH[torch.get_default_device().type], WIDTH, seed=dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        with record_function("the backward"):
            loss.backward()
        with record_function("the optimizer"):
            optimizer.step()

    events = _trace(algorithm, step)
    if algorithm == "async":
        handle.abort()
    backwards, steps = ranges(events, "the backward"), ranges(events, "the optimizer")
    assert len(backwards) == len(steps) == STEPS
    waits = []
    for backward, taken in zip(backwards, steps, strict=True):
        waits += waits_of_the_host(events, Interval(backward.begin, taken.end))
    return events, backwards, waits


@check(ALGORITHMS, seconds=25)
def host_waits_for_no_device_from_backward_to_the_end_of_the_optimizers_step(
    algorithm: str, options: dict[str, Any]
) -> str:
    events, backwards, waits = _traced(algorithm, options)
    assert waits == []
    of_nccl, of_codecs = (overlap(events, backwards, what) for what in ("nccl", "bagua"))
    if torch.get_default_device().type == "cuda":  # else a trace without kernels would do
        assert of_nccl.communication_streams
        assert of_nccl.computing_streams
    # Where several ranks share a GPU their kernels take turns: these times then say nothing.
    return f"beside backward {of_nccl.microseconds:.0f} us of NCCL and {of_codecs.microseconds:.0f} us of codecs"


@check(sizes=(2,), cuda_only=True)
def hook_that_waits_is_found() -> None:
    assert len(_traced("a hook that waits", {})[2]) >= STEPS


@check({f"{name}.{kernels}": (name, kernels) for name, kernels in OVERLAPPING}, seconds=25, cuda_only=True)
def communication_and_coding_run_beside_backward(name: str, kernels: str) -> None:
    events, backwards, _ = _traced(*ALGORITHMS[name])
    found = overlap(events, backwards, kernels)
    assert found.microseconds > 0.0, found
