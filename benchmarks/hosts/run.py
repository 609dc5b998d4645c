# SPDX-License-Identifier: Apache-2.0
"""Times training steps between emulated hosts, all ways to communicate in one run. Needs root and iproute2.

python benchmarks/hosts/run.py                      seven networks without a distance (about 8 minutes)
python benchmarks/hosts/run.py --grid               every rate with every distance (about 25 minutes)
python benchmarks/hosts/run.py --grid --congestion cubic --buffer 50ms               the grid as users' machines are
python benchmarks/hosts/run.py --grid --congestion cubic --buffer 50ms --loss 0.1%   and with losses
python benchmarks/hosts/run.py --rates 300M --round-trips 10ms --hosts 3 --ranks-per-host 2 --models transformer
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bagua.bench.emulated_hosts import (
    Network,
    NoEmulatedHosts,
    congestion_of,
    emulated_hosts,
    rate_of,
    share_of,
    time_of,
)
from bagua.info import congestion

sys.path.insert(0, str(Path(__file__).parents[1]))
from contenders import ALGORITHMS, MODELS
from ranks_of_benchmarks import Command, lines_of_the_first

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
WAYS = [
    "no communication",
    "gloo",
    "gloo, Adam",
    "gloo, fp16 hook",
    "gloo, bf16 hook",
    *ALGORITHMS,
]
# Algorithms that exchange weights once the step is done, or beside forward and backward.
AFTER_THE_STEP = ("low_precision_decentralized",)
BESIDE_THE_STEP = ("decentralized",)
# Bytes of a packet that carries payload: of Ethernet beside it, and of IP and TCP in it.
AROUND_A_PACKET = 14
IN_A_PACKET = 52
# Has glibc keep the gradients' memory, which it otherwise gives back and takes anew every step in some processes and in
# others not: 26 ms of page faults or 3.
STEADY_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
# torch's hook talks from callbacks, which now and then crashes or hangs on Gloo. It takes its turns in runs of its own,
# beside ways that tell how the machine fares, so that a failure costs no other figure.
FRAGILE = ["gloo, PowerSGD hook, rank 1", "gloo, PowerSGD hook, rank 4"]
BESIDE_FRAGILE = ["no communication", "powersgd, rank 1", "powersgd, rank 4"]
FRAGILE_RUNS = 3


@dataclass(frozen=True)
class Scenario:
    """A model, and the hosts that train it."""

    model: str
    hosts: int
    ranks_per_host: int
    bits_per_second: float
    # Seconds.
    round_trip: float = 0.0
    # The rest of the line, see Network. No buffer: one without end. A record without a congestion control is of a
    # machine whose default was BBR.
    loss: float = 0.0
    buffer: float | None = None
    packet: int = Network.packet
    congestion: str = ""

    @property
    def network(self) -> Network:
        """What lies between the hosts. A queue fills only where there is a rate."""
        return Network(
            self.bits_per_second,
            self.round_trip,
            self.loss,
            buffer=math.inf if self.buffer is None or not self.bits_per_second else self.buffer,
            packet=self.packet,
            congestion=congestion_of(self.congestion) if self.congestion else (),
        )

    @property
    def line(self) -> tuple[float, float | None, int, str]:
        """What all networks of a file have in common."""
        return self.loss, self.buffer, self.packet, self.congestion

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks_per_host == 1 else f"{self.ranks_per_host} ranks"
        return f"{self.model}, {self.hosts} hosts of {ranks}, {self.network}"


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


DEFAULT_SCENARIOS = [
    *(Scenario("convolutional", 2, 1, rate) for rate in (100e6, 1e9, 10e9, 0)),
    Scenario("convolutional", 2, 2, 1e9),
    Scenario("convolutional", 4, 1, 1e9),
    Scenario("transformer", 2, 1, 1e9),
]
# Every rate with every distance.
GRID = [Scenario("convolutional", 2, 1, rate, delay) for rate in (100e6, 1e9, 10e9) for delay in (0.0, 0.01, 0.05)]


def run_on_hosts(
    hosts: int, ranks_per_host: int, network: Network, script: list[str], limit: float
) -> list[dict[str, Any]]:
    """Start a script of this folder on every rank; return the lines of JSON that rank 0 prints."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(emulated_hosts(hosts, network))
        except NoEmulatedHosts as error:
            sys.exit(f"no emulated hosts on this machine: {error}")
        commands = []
        for index, host in enumerate(made):
            torchrun = ["-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={ranks_per_host}"]
            meeting = [f"--node-rank={index}", f"--master-addr={made[0].address}", "--master-port=29517"]
            command = host.command([sys.executable, *torchrun, *meeting, str(HERE / script[0]), *script[1:]])
            environment = {**host.environment(), **STEADY_ALLOCATOR, "OMP_NUM_THREADS": "1"}
            commands.append(Command(command, environment))
        return lines_of_the_first(commands, limit)


def measure(scenario: Scenario, ways: list[str], seconds: float, limit: float) -> list[Measurement]:
    """Return what rank 0 measured."""
    script = ["training_steps.py", scenario.model, str(scenario.hosts), str(seconds), *ways]
    lines = run_on_hosts(scenario.hosts, scenario.ranks_per_host, scenario.network, script, limit)
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


def add_limits(scenario: Scenario, measurements: list[Measurement]) -> None:
    """Fill in how long a step would take if nothing but computing, the line and its delay took time.

    All ranks of a host share its line, which carries headers too. The optimizer's step follows when the last bucket has
    arrived.
    """
    local = next((m for m in measurements if m.way == "no communication"), None)
    if local is None or not scenario.bits_per_second:
        return
    backward = local.median - statistics.median(local.optimizer_times)
    for m in measurements:
        with_headers = (scenario.packet + AROUND_A_PACKET) / (scenario.packet - IN_A_PACKET)
        wire = with_headers * m.bytes_between_hosts * scenario.ranks_per_host * 8 / scenario.bits_per_second
        if m.way in AFTER_THE_STEP:
            m.limit = local.median + wire
        elif m.way in BESIDE_THE_STEP:
            m.limit = max(local.median, wire)
        elif m.way not in ("async", "no communication"):
            # The last bucket's bytes leave, and arrive half a round trip later; without distance that is nothing.
            end = line_end(local.ready, wire) + scenario.round_trip / 2
            m.limit = max(backward, end) + statistics.median(m.optimizer_times)


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


@dataclass
class Fragile:
    """How one way of FRAGILE fared: how often it failed, and one run in which it did not, with those beside it."""

    way: str
    runs: int
    failures: list[str]
    measurements: list[Measurement]

    def __str__(self) -> str:
        counted = f"{self.way}: {len(self.failures)} of {self.runs} runs failed"
        if self.failures:
            counted += f" (the last: {self.failures[-1]})"
        return f"{counted}\n{table(self.measurements)}" if self.measurements else counted


def try_fragile(scenario: Scenario, way: str, seconds: float, runs: int) -> Fragile:
    """Run one way `runs` times beside BESIDE_FRAGILE."""
    tried = Fragile(way, runs, [], [])
    # All of them in turn, their settling, and the start of the processes.
    limit = 30 + 4 * seconds * (1 + len(BESIDE_FRAGILE))
    for _ in range(runs):
        try:
            tried.measurements = measure(scenario, [*BESIDE_FRAGILE, way], seconds, limit)
        except subprocess.TimeoutExpired as error:
            tried.failures.append(f"did not end within {error.timeout:.0f} s")
        except RuntimeError as error:
            tried.failures.append(str(error).splitlines()[0])
    if tried.measurements:
        add_limits(scenario, tried.measurements)
    return tried


def chosen_scenarios(args: argparse.Namespace) -> list[Scenario]:
    """Return the networks that were chosen, all on the line that was chosen."""
    if args.grid:
        places = [
            n
            for n in GRID
            if (not args.rates or n.bits_per_second in args.rates)
            and (not args.round_trips or n.round_trip in args.round_trips)
        ]
    elif not any((args.rates, args.round_trips, args.hosts, args.ranks_per_host, args.models)):
        places = DEFAULT_SCENARIOS
    else:
        choices = itertools.product(
            args.models or ["convolutional"],
            args.hosts or [2],
            args.ranks_per_host or [1],
            args.rates or [1e9],
            args.round_trips or [0.0],
        )
        places = [Scenario(*choice) for choice in choices]
    line = {"loss": args.loss, "buffer": args.buffer, "packet": args.packet, "congestion": args.congestion}
    return [replace(place, **line) for place in places]


def recorded(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["runs"] if path.exists() else []


def check_lines(path: Path, scenarios: list[Scenario]) -> None:
    """Refuse to put networks with different lines into one file, which tables and figures would mix up."""
    for run in recorded(path):
        other = Scenario(**run["scenario"])
        if other.line != scenarios[0].line:
            sys.exit(f"{path} has {other}, on another line than {scenarios[0]}: name another --json, or remove it")


def write(path: Path, run: dict[str, Any]) -> None:
    """Put a run into the file, in place of an earlier one on the same network."""
    runs = recorded(path)
    runs = [other for other in runs if Scenario(**other["scenario"]) != Scenario(**run["scenario"])]
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine, "runs": [*runs, run]}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="every rate, or those of --rates, with every distance")
    parser.add_argument("--rates", type=rate_of, nargs="+", help="bits per second, such as 100M or 1G; 0: no limit")
    parser.add_argument("--round-trips", type=time_of, nargs="+", help="between hosts, such as 10ms")
    parser.add_argument("--loss", type=share_of, default=0.0, help="packets that get lost, such as 0.1%%")
    parser.add_argument("--buffer", type=time_of, help="in front of the line, such as 50ms; without end by default")
    parser.add_argument("--packet", type=int, default=Network.packet, help="bytes of the largest IP packet")
    parser.add_argument("--congestion", default=congestion.in_use(), help="TCP's, by default the kernel's")
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--ranks-per-host", type=int, nargs="+")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS))
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--fragile-runs", type=int, default=FRAGILE_RUNS, help="of each rank of torch's PowerSGD hook")
    parser.add_argument("--seconds", type=float, default=4.0, help="that each way is given on each network")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a network is given up")
    parser.add_argument(
        "--json", type=Path, help="where to write all times; networks that it has and this run has not stay"
    )
    args = parser.parse_args()
    loss = "_loss" if args.loss else ""
    path = args.json or RESULTS / (f"grid{loss}.json" if args.grid else f"hosts{loss}.json")
    scenarios = chosen_scenarios(args)
    check_lines(path, scenarios)
    for scenario in scenarios:
        measurements = measure(scenario, args.ways, args.seconds, args.limit)
        add_limits(scenario, measurements)
        print(f"\n{scenario}\n{table(measurements)}", flush=True)
        fragile = [try_fragile(scenario, way, args.seconds, args.fragile_runs) for way in FRAGILE]
        print("\n".join(map(str, fragile)), flush=True)
        measured = {"scenario": asdict(scenario), "measurements": [asdict(m) for m in measurements]}
        write(path, {**measured, "fragile": [asdict(tried) for tried in fragile]})


if __name__ == "__main__":
    main()
