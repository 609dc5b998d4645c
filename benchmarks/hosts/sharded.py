# SPDX-License-Identifier: Apache-2.0
"""Steps of sharded models between two emulated hosts of two ranks: FSDP2 and HSDP over Gloo, bagua, and compressed.

sudo python benchmarks/hosts/sharded.py [RATE...]     # 1G 100M by default

All ways are timed in one process, step after step by turns, so that whatever else the machine does slows all of them
alike. Prints for each the median of a step, the bytes that a host sends in it as the kernel counts them, and both
against Gloo. Of FSDP2's steps two in three bytes are weights.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bagua
import torch
import torch.distributed as dist
from bagua.bench.emulated_hosts import Host, Network, emulated_hosts, rate_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

HOSTS, RANKS_PER_HOST = 2, 2
WIDTH, BLOCKS, BATCH = 1024, 4, 8
STEPS, FIRST_STEPS = 8, 2
# Of each: the mesh, the backend, and what compress() is given, if it is called.
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
}


def _group(sets: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup:
    """Make a group of each of these sets of ranks; returns this rank's."""
    groups = [(ranks, dist.new_group(list(ranks), backend=backend)) for ranks in sets]
    return next(group for ranks, group in groups if dist.get_rank() in ranks and group is not None)


def _mesh(kind: str, backend: str) -> DeviceMesh:
    ranks = torch.arange(HOSTS * RANKS_PER_HOST).view(HOSTS, RANKS_PER_HOST)
    if kind == "line":
        return DeviceMesh.from_group(_group([ranks.flatten().tolist()], backend), "cpu", mesh_dim_names=("shard",))
    dimensions = [_group(ranks.T.tolist(), backend), _group(ranks.tolist(), backend)]
    return DeviceMesh.from_group(dimensions, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


class Training:
    """A model, and what its steps have cost."""

    def __init__(self, kind: str, backend: str, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        mesh = _mesh(kind, backend)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)))
        for block in self.model:
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


def _train() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    trainings = {name: Training(*way) for name, way in WAYS.items()}
    batch = torch.randn(BATCH, WIDTH)
    for _ in range(STEPS):
        for training in trainings.values():
            training.step(batch)
    if dist.get_rank() == 0:
        costs = {name: (t.seconds[FIRST_STEPS:], t.bytes[FIRST_STEPS:]) for name, t in trainings.items()}
        print(json.dumps(costs), flush=True)
    dist.destroy_process_group()


def _measure(hosts: Sequence[Host]) -> dict[str, tuple[list[float], list[int]]]:
    """Return seconds and bytes of the steps of each way."""
    ranks = []
    for rank in range(HOSTS * RANKS_PER_HOST):
        host = hosts[rank // RANKS_PER_HOST]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_PER_HOST), "WORLD_SIZE": str(HOSTS * RANKS_PER_HOST)}
        meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29521", "OMP_NUM_THREADS": "1"}
        command = host.command([sys.executable, __file__, "--train"])
        environment = {**host.environment(), **own, **meeting}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    costs: dict[str, tuple[list[float], list[int]]] = json.loads(outputs[0].splitlines()[-1])
    return costs


def main() -> None:
    """Measure each rate named on the command line."""
    parameters = BLOCKS * WIDTH * (WIDTH + 1)
    for rate in sys.argv[1:] or ["1G", "100M"]:
        with emulated_hosts(HOSTS, Network(bits_per_second=rate_of(rate))) as hosts:
            costs = _measure(hosts)
        load = os.getloadavg()[0]
        print(f"\n{rate}bit/s, {HOSTS} hosts of {RANKS_PER_HOST} ranks, {parameters:,} parameters, load {load:.1f}")
        print(f"{'way':<32}{'ms per step':>12}{'speed':>8}{'MB per step':>13}{'of Gloo':>9}")
        for name, (seconds, sent) in costs.items():
            stock_seconds, stock_sent = costs[name.split(",")[0] + ", gloo"]
            step, size = statistics.median(seconds), statistics.median(sent)
            speed, share = statistics.median(stock_seconds) / step, size / statistics.median(stock_sent)
            print(f"{name:<32}{1e3 * step:>12.0f}{speed:>7.2f}x{size / 1e6:>13.2f}{share:>9.3f}", flush=True)


if __name__ == "__main__":
    _train() if "--train" in sys.argv else main()
