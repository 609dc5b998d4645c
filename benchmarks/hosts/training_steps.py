# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark: times steps of DistributedDataParallel under each way to communicate, in turn.

Started by run.py on every emulated host. Rank 0 prints a line of JSON per way: the median and all times in seconds.
"""

# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import bagua
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

ROUNDS = 5
STEPS = 3


def convolutional_network() -> tuple[nn.Module, Callable[[], Tensor]]:
    """10.6 million parameters, 42 MB of float32, most of them in few layers."""
    widths = [3, 64, 128, 256, 512, 512, 512]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 8192), nn.ReLU(), nn.Linear(8192, 10)
    )
    return model, lambda: torch.randn(8, 3, 64, 64)


def transformer() -> tuple[nn.Module, Callable[[], Tensor]]:
    """An encoder of 8 layers of width 320: 9.9 million parameters."""
    layer = nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), nn.Linear(320, 10))
    return model, lambda: torch.randn(2, 32, 320)


MODELS = {"convolutional": convolutional_network, "transformer": transformer}


def _torch_hook(hook: Any) -> Callable[[DistributedDataParallel, Any], None]:
    return lambda ddp, optimizer: ddp.register_comm_hook(None, hook)


def _power_sgd(ddp: DistributedDataParallel, optimizer: Any) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _ours(name: str, **options: Any) -> Callable[[DistributedDataParallel, Any], None]:
    def register(ddp: DistributedDataParallel, optimizer: Any) -> None:
        bagua.register_comm_hook(ddp, name, optimizer=optimizer, **options)

    return register


# Name -> (process group's backend, how to register).
WAYS: dict[str, tuple[str, Callable[[DistributedDataParallel, Any], Any]]] = {
    "gloo": ("gloo", lambda ddp, optimizer: None),
    "gloo, fp16 hook": ("gloo", _torch_hook(default_hooks.fp16_compress_hook)),
    "gloo, bf16 hook": ("gloo", _torch_hook(default_hooks.bf16_compress_hook)),
    "gradient_allreduce": ("bagua", _ours("gradient_allreduce")),
    "bytegrad": ("bagua", _ours("bytegrad")),
    "decentralized": ("bagua", _ours("decentralized")),
    "low_precision_decentralized": ("bagua", _ours("low_precision_decentralized")),
    "qadam": ("bagua", _ours("qadam")),
    "async": ("bagua", _ours("async", sync_interval_ms=200)),
    "no communication": ("gloo", _torch_hook(None)),
}


def _local(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Contender:
    """A model that communicates in one way."""

    def __init__(self, name: str, model: str, groups: dict[str, dist.ProcessGroup]) -> None:
        torch.manual_seed(1)
        network, self._input = MODELS[model]()
        backend, register = WAYS[name]
        self.name = name
        self.ddp = DistributedDataParallel(network, process_group=groups[backend])
        if name == "qadam":
            self.optimizer: Any = bagua.QAdamOptimizer(network.parameters(), lr=1e-6, warmup_steps=2)
        else:
            self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)
        if name == "no communication":
            self.ddp.register_comm_hook(None, _local)
        else:
            register(self.ddp, self.optimizer)
        self.times: list[float] = []

    def steps(self, count: int, *, is_timed: bool) -> None:
        """Take some steps; all ranks begin each at the same time."""
        for _ in range(count):
            x = self._input()
            dist.barrier()
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            self.ddp(x).square().mean().backward()
            self.optimizer.step()
            if is_timed:
                self.times.append(time.perf_counter() - begin)


def main() -> None:
    """Interleave the ways named on the command line (model, names...), so that all see the same machine."""
    model, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    assert dist.group.WORLD is not None
    groups = {"bagua": dist.group.WORLD, "gloo": gloo}
    contenders = [Contender(name, model, groups) for name in names]
    for contender in contenders:
        contender.steps(4, is_timed=False)  # DDP rebuilds its buckets, qadam ends its warm-up
    for _ in range(ROUNDS):
        for contender in contenders:
            contender.steps(1, is_timed=False)
            contender.steps(STEPS, is_timed=True)
    for contender in contenders:
        if dist.get_rank() == 0:
            median = sorted(contender.times)[len(contender.times) // 2]
            print(json.dumps({"way": contender.name, "median": median, "times": contender.times}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
