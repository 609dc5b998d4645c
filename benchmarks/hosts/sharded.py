# SPDX-License-Identifier: Apache-2.0
"""Steps of sharded models between emulated hosts: FSDP2 and HSDP over Gloo, bagua, and compressed, beside DDP's. Needs
root.

python benchmarks/hosts/sharded.py --rates 1G 100M --hosts 2 --ranks 2 --width 1024

All ways are timed in one process, step after step by turns, so that whatever else the machine does slows all of them
alike. Prints for each the median of a step, the bytes that a host sends in it as the kernel counts them, and both
against Gloo. Of FSDP2's steps two in three bytes are weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bagua
import torch
import torch.distributed as dist
from bagua.bench.emulated_hosts import Network, rate_of
from run import run_on_hosts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BLOCKS, BATCH = 4, 8
FIRST_STEPS = 2
SECONDS = 3600.0
# Of each: the mesh, the backend, and what compress() is given, if it is called. DDP has no mesh.
WAYS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "FSDP2, gloo": ("line", "gloo", None),
    "FSDP2, bagua": ("line", "bagua", None),
    "FSDP2, cached gathers": ("line", "bagua", {"gradients": "gradient_allreduce", "weights": "cache"}),
    "FSDP2, int8 and cached gathers": ("line", "bagua", {"gradients": "int8", "weights": "cache"}),
    "FSDP2, 4bit and cached gathers": ("line", "bagua", {"gradients": "4bit", "weights": "cache"}),
    "FSDP2, int8, coded gathers": ("line", "bagua", {"gradients": "int8", "weights": "int8"}),
    "FSDP2, 4bit, coded gathers": ("line", "bagua", {"gradients": "4bit", "weights": "4bit"}),
    "HSDP, gloo": ("hybrid", "gloo", None),
    "HSDP, bagua": ("hybrid", "bagua", None),
    "HSDP, int8": ("hybrid", "bagua", {"gradients": "int8"}),
    "HSDP, 4bit": ("hybrid", "bagua", {"gradients": "4bit"}),
    "DDP, gloo": ("none", "gloo", None),
    "DDP, bagua": ("none", "bagua", None),
    "DDP, int8": ("none", "bagua", {"algorithm": "bytegrad"}),
    "DDP, 4bit": ("none", "bagua", {"algorithm": "quantized_allreduce"}),
}


class _Shape(NamedTuple):
    hosts: int
    ranks: int
    width: int
    steps: int


def _group(sets: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup:
    """Make a group of each of these sets of ranks; returns this rank's."""
    groups = [(ranks, dist.new_group(list(ranks), backend=backend)) for ranks in sets]
    return next(group for ranks, group in groups if dist.get_rank() in ranks and group is not None)


def _mesh(kind: str, backend: str, hosts: int) -> DeviceMesh:
    ranks = torch.arange(dist.get_world_size()).view(hosts, -1)
    if kind == "line":
        return DeviceMesh.from_group(_group([ranks.flatten().tolist()], backend), "cpu", mesh_dim_names=("shard",))
    dimensions = [_group(ranks.T.tolist(), backend), _group(ranks.tolist(), backend)]
    return DeviceMesh.from_group(dimensions, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


class Training:
    """A model, and what its steps have cost."""

    def __init__(self, shape: _Shape, kind: str, backend: str, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        width = shape.width
        self.model: nn.Module = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(BLOCKS))
        )
        if kind == "none":
            group = _group([list(range(dist.get_world_size()))], backend)
            self.model = DistributedDataParallel(self.model, process_group=group)
            if options is not None:
                bagua.register_comm_hook(self.model, **options)
        else:
            mesh = _mesh(kind, backend, shape.hosts)
            for block in self.model.children():
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            if options is not None:
                bagua.fsdp.compress(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    def step(self, batch: torch.Tensor) -> None:
        """All ranks begin and end it together."""
        dist.barrier()
        sent, start = _sent_by_this_host(), time.perf_counter()
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.bytes.append(_sent_by_this_host() - sent)


def _sent_by_this_host() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.partition(":")[2].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def _train(shape: _Shape) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    # HSDP is left out where hosts have one rank each, among which there is nothing to shard.
    ways = {name: way for name, way in WAYS.items() if shape.ranks > 1 or way[0] != "hybrid"}
    trainings = {name: Training(shape, *way) for name, way in ways.items()}
    batch = torch.randn(BATCH, shape.width)
    for _ in range(shape.steps + FIRST_STEPS):
        for training in trainings.values():
            training.step(batch)
    if dist.get_rank() == 0:
        costs = {name: (t.seconds[FIRST_STEPS:], t.bytes[FIRST_STEPS:]) for name, t in trainings.items()}
        print(json.dumps(costs), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1G", "100M"], help="bits per second of a host (1G 100M)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host (2)")
    parser.add_argument("--width", type=int, default=1024, help="of each of 4 layers (1024)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each way (6)")
    parser.add_argument("--train", type=int, nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        _train(_Shape(*args.train))
        return
    shape = _Shape(args.hosts, args.ranks, args.width, args.steps)
    parameters = BLOCKS * shape.width * (shape.width + 1)
    for rate in args.rates:
        script = [Path(__file__).name, "--train", *map(str, shape)]
        (costs,) = run_on_hosts(shape.hosts, shape.ranks, Network(rate_of(rate)), script, SECONDS)
        load = os.getloadavg()[0]
        print(f"\n{rate}bit/s, {shape.hosts} hosts of {shape.ranks} ranks, {parameters:,} parameters, load {load:.1f}")
        print(f"{'way':<32}{'ms per step':>12}{'speed':>8}{'MB per step':>13}{'of Gloo':>9}")
        for name, (seconds, sent) in costs.items():
            stock_seconds, stock_sent = costs[name.split(",")[0] + ", gloo"]
            step, size = statistics.median(seconds), statistics.median(sent)
            speed, share = statistics.median(stock_seconds) / step, size / statistics.median(stock_sent)
            print(f"{name:<32}{1e3 * step:>12.0f}{speed:>7.2f}x{size / 1e6:>13.2f}{share:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
