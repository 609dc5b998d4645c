# SPDX-License-Identifier: Apache-2.0
"""Traces of training steps: the host waits for no device before the optimizer's step, and communication overlaps.

On the CPU the same steps are traced, and only that the parts of a step are found in the trace is checked.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import randn
from ranks import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function
from traces import Event, Interval, Overlap, overlap, ranges, waits_of_the_host

pytestmark = pytest.mark.any_device

# DDP times its own first ten steps, and qadam ends its warm-up.
WARM_UP = 12
STEPS = 3
WIDTH = 1024
LAYERS = 8
# A backward of some milliseconds on a GPU.
BATCH = {"cpu": 4, "cuda": 8192}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "qadam": {"hierarchical": False},
    "decentralized": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "async": {"sync_interval_ms": 1},
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


class Findings(NamedTuple):
    """Of one rank."""

    waits: list[str]
    # With the kernels that have this in their name.
    overlaps: dict[str, Overlap]


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


def _trace(step: Any) -> list[Event]:
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
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text())["traceEvents"]
    return events


def _findings(algorithm: str, options: dict[str, Any]) -> Findings:
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

    events = _trace(step)
    if algorithm == "async":
        handle.abort()
    backwards, steps = ranges(events, "the backward"), ranges(events, "the optimizer")
    assert len(backwards) == len(steps) == STEPS
    waits = []
    for backward, taken in zip(backwards, steps, strict=True):
        waits += waits_of_the_host(events, Interval(backward.begin, taken.end))
    return Findings(waits, {what: overlap(events, backwards, what) for what in ("nccl", "bagua")})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_host_waits_for_no_device_from_backward_to_the_end_of_the_optimizers_step(
    peers: RankPool, algorithm: str
) -> None:
    for rank, found in enumerate(peers.run(_findings, algorithm, ALGORITHMS[algorithm], timeout=120.0)):
        assert found.waits == [], f"rank {rank}"


@pytest.mark.cuda_only
def test_a_hook_that_waits_is_found(peers: RankPool) -> None:
    for found in peers.run(_findings, "a hook that waits", {}, timeout=120.0):
        assert len(found.waits) >= STEPS


@pytest.mark.cuda_only
@pytest.mark.parametrize(("algorithm", "kernels"), OVERLAPPING)
def test_communication_and_coding_run_beside_backward(peers: RankPool, algorithm: str, kernels: str) -> None:
    for found in peers.run(_findings, algorithm, ALGORITHMS[algorithm], timeout=120.0):
        assert found.overlaps[kernels].microseconds > 0.0, found
