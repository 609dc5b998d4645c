# SPDX-License-Identifier: Apache-2.0
"""Times training steps between emulated hosts, all ways to communicate in one run. Needs root and iproute2.

python benchmarks/hosts/run.py                      the networks that docs/performance.md shows (about 8 minutes)
python benchmarks/hosts/run.py --rates 300e6 --hosts 3 --ranks-per-host 2 --models transformer
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from emulated_hosts import NoEmulatedHosts, emulated_hosts

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks_of_benchmarks import Command, lines_of_the_first

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
WAYS = [
    "no communication",
    "gloo",
    "gloo, Adam",
    "gloo, fp16 hook",
    "gloo, bf16 hook",
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "low_precision_decentralized",
    "decentralized",
    "async",
]
# Algorithms that exchange weights once the step is done, or beside forward and backward.
AFTER_THE_STEP = ("low_precision_decentralized",)
BESIDE_THE_STEP = ("decentralized",)
# Bytes of Ethernet, IP and TCP that carry one of payload.
WITH_HEADERS = 1514 / 1448
# Has glibc keep the gradients' memory, which it otherwise gives back and takes anew every step in some processes and in
# others not: 26 ms of page faults or 3.
STEADY_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
# torch's hook talks from callbacks, which crashes or hangs on Gloo: by itself, and once.
FRAGILE = "gloo, PowerSGD hook"


@dataclass(frozen=True)
class Network:
    """What one run of the benchmark takes place on."""

    model: str
    hosts: int
    ranks_per_host: int
    bits_per_second: float

    def __str__(self) -> str:
        rate = f"{self.bits_per_second / 1e6:,.0f} Mbit/s" if self.bits_per_second else "no limit"
        ranks = "1 rank" if self.ranks_per_host == 1 else f"{self.ranks_per_host} ranks"
        return f"{self.model}, {self.hosts} hosts of {ranks}, {rate}"


@dataclass
class Measurement:
    """What one way to communicate took, in seconds per step; see `limit`."""

    way: str
    times: list[float]
    bytes_between_hosts: float
    optimizer_times: list[float]
    # Of "no communication": for each step, when each bucket was ready and its bytes.
    ready: list[list[tuple[float, int]]] = field(default_factory=list)
    limit: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.times)


DEFAULT_NETWORKS = [
    *(Network("convolutional", 2, 1, rate) for rate in (100e6, 1e9, 10e9, 0)),
    Network("convolutional", 2, 2, 1e9),
    Network("convolutional", 4, 1, 1e9),
    Network("transformer", 2, 1, 1e9),
]


def run_on_hosts(
    hosts: int,
    ranks_per_host: int,
    bits_per_second: float,
    script: list[str],
    limit: float,
    more: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Start a script, of this folder or of an absolute path, on every rank, with `more` in its environment.

    Return the lines of JSON that rank 0 prints.
    """
    with emulated_hosts(hosts, bits_per_second or None) as made:
        commands = []
        for index, host in enumerate(made):
            torchrun = ["-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={ranks_per_host}"]
            meeting = [f"--node-rank={index}", f"--master-addr={made[0].address}", "--master-port=29517"]
            command = host.command([sys.executable, *torchrun, *meeting, str(HERE / script[0]), *script[1:]])
            environment = {**host.environment(), **STEADY_ALLOCATOR, "OMP_NUM_THREADS": "1", **(more or {})}
            environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
            commands.append(Command(command, environment))
        return lines_of_the_first(commands, limit)


def measure(network: Network, ways: list[str], seconds: float, limit: float = 900) -> list[Measurement]:
    """Return what rank 0 measured."""
    script = ["training_steps.py", network.model, str(network.hosts), str(seconds), *ways]
    lines = run_on_hosts(network.hosts, network.ranks_per_host, network.bits_per_second, script, limit)
    return [Measurement(**line) for line in lines]


def line_end(ready: list[list[tuple[float, int]]], wire: float) -> float:
    """Return when a line that needs `wire` seconds for all buckets could be done with them, in the median step.

    It sends a bucket when that is ready and those before it are through.
    """
    ends = []
    for buckets in ready:
        total = sum(size for _, size in buckets)
        end = 0.0
        for time, size in buckets:
            end = max(end, time) + wire * size / total
        ends.append(end)
    return statistics.median(ends)


def add_limits(network: Network, measurements: list[Measurement]) -> None:
    """Fill in how long a step would take if nothing but computing and the line took time.

    All ranks of a host share its line, which carries headers too. The optimizer's step follows when the last bucket has
    arrived.
    """
    local = next((m for m in measurements if m.way == "no communication"), None)
    if local is None or not network.bits_per_second:
        return
    backward = local.median - statistics.median(local.optimizer_times)
    for m in measurements:
        wire = WITH_HEADERS * m.bytes_between_hosts * network.ranks_per_host * 8 / network.bits_per_second
        if m.way in AFTER_THE_STEP:
            m.limit = local.median + wire
        elif m.way in BESIDE_THE_STEP:
            m.limit = max(local.median, wire)
        elif m.way not in ("async", "no communication"):
            m.limit = max(backward, line_end(local.ready, wire)) + statistics.median(m.optimizer_times)


def table(measurements: list[Measurement]) -> str:
    """Return milliseconds per step, beside Gloo's, beside the fp16 hook's and beside the limit."""
    median = {m.way: m.median for m in measurements}
    titles = ("ms per step", "gloo / this", "fp16 / this", "this / limit", "MB sent")
    lines = ["".join([f"{'':<30}", *(f"{title:>14}" for title in titles)])]
    for m in measurements:
        cells = [f"{1e3 * m.median:.1f}"]
        cells += [f"{median[way] / m.median:.2f}" if way in median else "-" for way in ("gloo", "gloo, fp16 hook")]
        cells += [f"{m.median / m.limit:.2f}" if m.limit else "-", f"{m.bytes_between_hosts / 1e6:.2f}"]
        lines.append("".join([f"{m.way:<30}", *(f"{cell:>14}" for cell in cells)]))
    return "\n".join(lines)


def try_fragile(seconds: float) -> str:
    """Say how torch's PowerSGD hook fares."""
    try:
        measured = measure(Network("convolutional", 2, 1, 1e9), [FRAGILE], seconds, limit=90)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"{FRAGILE}: fails on this torch ({type(error).__name__}: {str(error).splitlines()[0]})"
    return (
        f"{FRAGILE}: {1e3 * measured[0].median:.1f} ms per step, alone (convolutional, 2 hosts of 1 rank, 1,000 Mbit/s)"
    )


def chosen_networks(args: argparse.Namespace) -> list[Network]:
    if not any((args.rates, args.hosts, args.ranks_per_host, args.models)):
        return DEFAULT_NETWORKS
    choices = itertools.product(
        args.models or ["convolutional"], args.hosts or [2], args.ranks_per_host or [1], args.rates or [1e9]
    )
    return [Network(*choice) for choice in choices]


def main() -> None:
    """Measure, print a table for each network, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", help="bits per second; 0: no limit")
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--ranks-per-host", type=int, nargs="+")
    parser.add_argument("--models", nargs="+", choices=("convolutional", "transformer"))
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--seconds", type=float, default=4.0, help="that each way is given on each network")
    parser.add_argument("--json", type=Path, default=RESULTS / "hosts.json", help="where to write all times")
    args = parser.parse_args()
    runs = []
    try:
        for network in chosen_networks(args):
            measurements = measure(network, args.ways, args.seconds)
            add_limits(network, measurements)
            print(f"\n{network}\n{table(measurements)}", flush=True)
            runs.append({"network": asdict(network), "measurements": [asdict(m) for m in measurements]})
        fragile = try_fragile(args.seconds)
    except NoEmulatedHosts as error:
        sys.exit(f"no emulated hosts on this machine: {error}")
    print(f"\n{fragile}")
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**machine, "runs": runs, "fragile": fragile}, indent=1))


if __name__ == "__main__":
    main()
