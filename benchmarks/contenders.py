# SPDX-License-Identifier: Apache-2.0
"""Models that train side by side on every rank, each communicating in its own way: what is shared by the benchmarks of
training steps between emulated hosts (hosts/) and on GPUs (gpu/).
"""

# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import bagua
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

ROUNDS = 3
FEWEST_STEPS = 1
# The optimizer's own warm-up of a contender that has one, and DDP's rebuilding of its buckets.
SETTLING_STEPS = 4

# Of ways(), those of ours that every benchmark of training steps compares.
ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "quantized_allreduce, 4bit",
    "quantized_allreduce, 1bit",
    "powersgd, rank 1",
    "powersgd, rank 4",
    "qadam",
    "low_precision_decentralized",
    "decentralized",
    "async",
)

# A network, and what makes a batch for it.
Model = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]


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


def small_network() -> tuple[nn.Module, Callable[[], Tensor]]:
    """2.1 million parameters, 8.4 MB, in 8 layers: little to compute, so that what is seen is the network."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers), lambda: torch.randn(64, 512)


MODELS: dict[str, Model] = {
    "convolutional": convolutional_network,
    "transformer": transformer,
    "small": small_network,
}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-6),
    "QAdam": lambda parameters: bagua.QAdamOptimizer(parameters, lr=1e-6, warmup_steps=2),
}


class Way(NamedTuple):
    """A way to communicate: the process group's backend, how to register with DDP, and the optimizer that it needs."""

    backend: str
    register: Callable[[DistributedDataParallel, Any], Any]
    optimizer: str = "SGD"


def _nothing(ddp: DistributedDataParallel, optimizer: Any) -> None:
    return None


def _torch_hook(hook: Any) -> Callable[[DistributedDataParallel, Any], None]:
    # Without a group these hooks take the default one, which is ours.
    return lambda ddp, optimizer: ddp.register_comm_hook(ddp.process_group, hook)


def _torchs_power_sgd(rank: int) -> Callable[[DistributedDataParallel, Any], None]:
    def register(ddp: DistributedDataParallel, optimizer: Any) -> None:
        state = powerSGD_hook.PowerSGDState(
            ddp.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _ours(name: str, **options: Any) -> Callable[[DistributedDataParallel, Any], bagua.Handle]:
    def register(ddp: DistributedDataParallel, optimizer: Any) -> bagua.Handle:
        return bagua.register_comm_hook(ddp, name, optimizer=optimizer, **options)

    return register


class LocalHook:
    """Leaves every bucket as it is, and notes when each was ready, with its bytes."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.buckets: list[tuple[float, int]] = []

    def reduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self.buckets = []
        self.buckets.append((time.perf_counter() - self.begin, bucket.buffer().nbytes))
        devices = [bucket.buffer().device] if bucket.buffer().is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(bucket.buffer())
        return future


def _stay_local(ddp: DistributedDataParallel, optimizer: Any) -> LocalHook:
    hook = LocalHook()
    ddp.register_comm_hook(None, hook.reduce)
    return hook


def ways(stock: str) -> dict[str, Way]:
    """All ways by name, beside DDP as it is on the `stock` backend, "gloo" or "nccl"."""
    return {
        stock: Way(stock, _nothing),
        f"{stock}, Adam": Way(stock, _nothing, "Adam"),
        f"{stock}, QAdam": Way(stock, _nothing, "QAdam"),
        f"{stock}, fp16 hook": Way(stock, _torch_hook(default_hooks.fp16_compress_hook)),
        f"{stock}, bf16 hook": Way(stock, _torch_hook(default_hooks.bf16_compress_hook)),
        f"{stock}, PowerSGD hook, rank 1": Way(stock, _torchs_power_sgd(1)),
        f"{stock}, PowerSGD hook, rank 4": Way(stock, _torchs_power_sgd(4)),
        "gradient_allreduce": Way("bagua", _ours("gradient_allreduce")),
        "bytegrad": Way("bagua", _ours("bytegrad")),
        "quantized_allreduce, 4bit": Way("bagua", _ours("quantized_allreduce", codec="4bit")),
        "quantized_allreduce, 1bit": Way("bagua", _ours("quantized_allreduce", codec="1bit")),
        "powersgd, rank 1": Way("bagua", _ours("powersgd", rank=1, start_step=2)),
        "powersgd, rank 4": Way("bagua", _ours("powersgd", rank=4, start_step=2)),
        "decentralized": Way("bagua", _ours("decentralized")),
        "low_precision_decentralized": Way("bagua", _ours("low_precision_decentralized")),
        "qadam": Way("bagua", _ours("qadam"), "QAdam"),
        "async": Way("bagua", _ours("async", sync_interval_ms=200, warmup_steps=0)),
        "no communication": Way(stock, _stay_local),
    }


class Step(NamedTuple):
    """Seconds of a step and of its optimizer; when each bucket was ready and its bytes, if it stayed local."""

    seconds: float
    optimizer: float
    buckets: list[tuple[float, int]]


class Contender:
    """A model that communicates in one way."""

    def __init__(self, name: str, way: Way, model: Model, group: dist.ProcessGroup, device: str = "cpu") -> None:
        torch.manual_seed(1)
        network, self._input = model()
        network.to(device)
        self._device = torch.device(device)
        self.name = name
        self.parameters = sum(p.numel() for p in network.parameters())
        # As finely as our hooks cut them between hosts, to see when the line could begin.
        layout = {"bucket_cap_mb": 4} if name == "no communication" else {}
        self.ddp = DistributedDataParallel(network, process_group=group, **layout)
        # What is compared is the way of the gradients, not DDP's broadcast before every forward.
        self.ddp.broadcast_buffers = False
        self.optimizer: Any = OPTIMIZERS[way.optimizer](network.parameters())
        registered = way.register(self.ddp, self.optimizer)
        self._local = registered if isinstance(registered, LocalHook) else None
        self.handle: Any = None if self._local else registered
        # Those that count.
        self.steps: list[Step] = []
        self.counted_bytes = 0.0

    @property
    def times(self) -> list[float]:
        """Seconds of the steps that count."""
        return [step.seconds for step in self.steps]

    def step(self) -> Step:
        """Take a step, which all ranks begin at the same time."""
        x = self._input().to(self._device)
        self._settle()
        dist.barrier()
        begin = time.perf_counter()
        if self._local:
            self._local.begin = begin
        self.optimizer.zero_grad()
        self.ddp(x).square().mean().backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self._settle()
        end = time.perf_counter()
        return Step(end - begin, end - backward, self._local.buckets if self._local else [])

    def _settle(self) -> None:
        # Of this stream alone. A rank that waited for all streams would wait for a background round which another rank
        # joins in its next step, and that rank waits for this one before it begins it.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def round(self, steps: int) -> None:
        """Take one step to warm the caches, and then those that count."""
        self.step()
        before = self._sent()
        self.steps += [self.step() for _ in range(steps)]
        self.counted_bytes += self._sent() - before

    def _sent(self) -> float:
        return self.handle.stats()["wire_bytes_between_hosts"] if self.handle else 0.0


def take_turns(contenders: Sequence[Contender], seconds: float, most_steps: int) -> None:
    """Give each about `seconds`, in turns, so that all see the same machine; at most `most_steps` at a time."""
    for contender in contenders:
        for _ in range(SETTLING_STEPS):
            estimate = contender.step().seconds
    for _ in range(ROUNDS):
        for contender in contenders:
            wanted = torch.tensor([seconds / ROUNDS / (contender.times or [estimate])[-1]])
            dist.broadcast(wanted, 0)  # ranks take the same number of steps
            contender.round(min(max(int(wanted), FEWEST_STEPS), most_steps))


def measure(
    names: Sequence[str], stock: str, model: Model, seconds: float, most_steps: int, device: str = "cpu"
) -> list[Contender]:
    """Measure the ways named, in a default group of backend "bagua" and one of backend `stock` beside it."""
    beside = dist.new_group(backend=stock)
    assert isinstance(beside, dist.ProcessGroup)
    assert dist.group.WORLD is not None
    groups: Mapping[str, dist.ProcessGroup] = {"bagua": dist.group.WORLD, stock: beside}
    known = ways(stock)

    def make(name: str) -> Contender:
        return Contender(name, known[name], model, groups[known[name].backend], device)

    # One that communicates in the background would disturb the others: on its own.
    together = [make(name) for name in names if name != "async"]
    take_turns(together, seconds, most_steps)
    alone = [make(name) for name in names if name == "async"]
    take_turns(alone, seconds, most_steps)
    for contender in alone:
        contender.handle.abort()
    return together + alone
