# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark: times steps of DistributedDataParallel under each way to communicate, in turn.

Started by run.py on every emulated host: training_steps.py MODEL HOSTS SECONDS WAY... Rank 0 prints a line of JSON per
way: all times in seconds, and the bytes that one rank sends to other hosts in a step. Every way is given about SECONDS.
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

ROUNDS = 3
FEWEST_STEPS = 1
MOST_STEPS = 6


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
    # Without a group these hooks take the default one, which is ours.
    return lambda ddp, optimizer: ddp.register_comm_hook(ddp.process_group, hook)


def _power_sgd(ddp: DistributedDataParallel, optimizer: Any) -> None:
    state = powerSGD_hook.PowerSGDState(ddp.process_group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _ours(name: str, **options: Any) -> Callable[[DistributedDataParallel, Any], bagua.Handle]:
    def register(ddp: DistributedDataParallel, optimizer: Any) -> bagua.Handle:
        return bagua.register_comm_hook(ddp, name, optimizer=optimizer, **options)

    return register


# Name -> (process group's backend, how to register).
WAYS: dict[str, tuple[str, Callable[[DistributedDataParallel, Any], Any]]] = {
    "gloo": ("gloo", lambda ddp, optimizer: None),
    "gloo, Adam": ("gloo", lambda ddp, optimizer: None),
    "gloo, fp16 hook": ("gloo", _torch_hook(default_hooks.fp16_compress_hook)),
    "gloo, bf16 hook": ("gloo", _torch_hook(default_hooks.bf16_compress_hook)),
    "gloo, PowerSGD hook": ("gloo", _power_sgd),
    "gradient_allreduce": ("bagua", _ours("gradient_allreduce")),
    "bytegrad": ("bagua", _ours("bytegrad")),
    "decentralized": ("bagua", _ours("decentralized")),
    "low_precision_decentralized": ("bagua", _ours("low_precision_decentralized")),
    "qadam": ("bagua", _ours("qadam")),
    "async": ("bagua", _ours("async", sync_interval_ms=200, warmup_steps=0)),
    "no communication": ("gloo", lambda ddp, optimizer: None),
}
# Bytes of a parameter as these send it, twice (n - 1) / n times; the others count for themselves.
STOCK_BYTES = {"gloo": 4, "gloo, Adam": 4, "gloo, fp16 hook": 2, "gloo, bf16 hook": 2}


class LocalHook:
    """Leaves every bucket as it is, and notes when each was ready, with its bytes."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.steps: list[list[tuple[float, int]]] = []

    def reduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self.steps.append([])
        self.steps[-1].append((time.perf_counter() - self.begin, bucket.buffer().nbytes))
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
        self.parameters = sum(p.numel() for p in network.parameters())
        # As finely as our hooks cut them between hosts, to see when the line could begin.
        layout = {"bucket_cap_mb": 4} if name == "no communication" else {}
        self.ddp = DistributedDataParallel(network, process_group=groups[backend], **layout)
        if name == "qadam":
            self.optimizer: Any = bagua.QAdamOptimizer(network.parameters(), lr=1e-6, warmup_steps=2)
        elif name == "gloo, Adam":
            self.optimizer = torch.optim.Adam(network.parameters(), lr=1e-6)
        else:
            self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)
        self.handle: Any = None
        self.local = LocalHook()
        if name == "no communication":
            self.ddp.register_comm_hook(None, self.local.reduce)
        else:
            self.handle = register(self.ddp, self.optimizer)
        self.times: list[float] = []
        self.optimizer_times: list[float] = []
        self.counted_steps = 0
        self.counted_bytes = 0.0

    def step(self) -> float:
        """Take a step, which all ranks begin at the same time; return its seconds."""
        x = self._input()
        dist.barrier()
        begin = self.local.begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.ddp(x).square().mean().backward()
        backward = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.optimizer_times.append(end - backward)
        return end - begin

    def round(self, steps: int) -> None:
        """Take one step to warm the caches, and then those that count."""
        self.step()
        before = self._sent()
        self.times += [self.step() for _ in range(steps)]
        self.counted_bytes += self._sent() - before
        self.counted_steps += steps

    def _sent(self) -> float:
        return self.handle.stats()["wire_bytes_between_hosts"] if self.handle else 0.0

    def bytes_per_step(self, hosts: int) -> float:
        """Return what one rank sends to other hosts."""
        if self.name in STOCK_BYTES:
            ranks_of_host = dist.get_world_size() / hosts
            return 2 * (hosts - 1) / hosts * self.parameters * STOCK_BYTES[self.name] / ranks_of_host
        return self.counted_bytes / self.counted_steps


def _measure(contenders: list[Contender], seconds: float) -> None:
    """Let all take turns, so that they see the same machine."""
    for contender in contenders:
        for _ in range(4):  # DDP rebuilds its buckets, qadam ends its warm-up
            estimate = contender.step()
    for _ in range(ROUNDS):
        for contender in contenders:
            wanted = torch.tensor([seconds / ROUNDS / (contender.times or [estimate])[-1]])
            dist.broadcast(wanted, 0)  # ranks take the same number of steps
            contender.round(min(max(int(wanted), FEWEST_STEPS), MOST_STEPS))


def main() -> None:
    """Measure the ways named on the command line."""
    model, hosts, seconds, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    assert dist.group.WORLD is not None
    groups = {"bagua": dist.group.WORLD, "gloo": gloo}
    # One that communicates in the background would disturb the others: on its own.
    together = [Contender(name, model, groups) for name in names if name != "async"]
    _measure(together, float(seconds))
    alone = [Contender(name, model, groups) for name in names if name == "async"]
    _measure(alone, float(seconds))
    for contender in alone:
        contender.handle.abort()
    for contender in together + alone:
        if dist.get_rank() == 0:
            result = {
                "way": contender.name,
                "times": contender.times,
                "bytes_between_hosts": contender.bytes_per_step(int(hosts)),
                "optimizer_times": contender.optimizer_times,
                "ready": contender.local.steps,
            }
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
