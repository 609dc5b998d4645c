# SPDX-License-Identifier: Apache-2.0
"""What a training step costs, by rate, delay and messages: cost_model.py RESULTS prints how far that can be relied on.

    step = max(compute + processor, end of the line at efficiency * rate + processor / 2) + optimizer
           + delays * round trip / 2
    processor = (messages * price of a message + overhead) * ranks per core

`compute`, the optimizer's part and when each bucket is ready are measured; bytes and messages per rank follow from the
algorithm and the number of hosts. Half of the processor's work is done while the line is busy. `efficiency`, `delays`
and `overhead` of each way are fitted by least squares of relative errors to grid.json, two hosts on nine networks.
hosts.json, of another day and with other hosts and networks, takes no part in the fit: the errors printed for it are
those of predictions, as are those of each network of the grid by a fit to the other eight.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from run import AFTER_THE_STEP, Measurement, Scenario, line_end

BUCKETS = 8
CORES = 2
# Of a message on both sides, as in backend/cpu/collectives/agreed_line.cpp.
MESSAGE_SECONDS = 25e-6
# Of the processor's work, what the line does not hide.
BEHIND_THE_LINE = 0.5
# More hosts than this never speak with each other all at once in an allreduce.
MOST_AT_ONCE = 32


def _rounds(hosts: int) -> int:
    """Return the messages of a rank in two rounds between halves of halves."""
    levels = math.ceil(math.log2(hosts))
    return (1 << (levels + 1) // 2) + (1 << levels // 2) - 2


def _in_parts(hosts: int) -> int:
    return 2 * (hosts - 1) if hosts <= MOST_AT_ONCE else 2 * _rounds(hosts)


def _coded(bits: int) -> Callable[[int], tuple[float, int]]:
    def traffic(hosts: int) -> tuple[float, int]:
        gather = _rounds(hosts) if hosts > 8 else hosts - 1
        return bits / 4 * (hosts - 1) / hosts, hosts - 1 + gather

    return traffic


# Bytes per parameter and messages per bucket that a rank sends among n hosts.
TRAFFIC: dict[str, Callable[[int], tuple[float, int]]] = {
    # A ring: n - 1 steps of reduce-scatter, n - 1 of all-gather.
    "gloo": lambda n: (8 * (n - 1) / n, 2 * (n - 1)),
    "gloo, fp16 hook": lambda n: (4 * (n - 1) / n, 2 * (n - 1)),
    "gradient_allreduce": lambda n: (8 * (n - 1) / n, _in_parts(n)),
    "bytegrad": _coded(8),
    "quantized_allreduce, 4bit": _coded(4),
    "qadam": _coded(8),
    # Both neighbours, who are one and the same between two hosts.
    "low_precision_decentralized": lambda n: (float(min(n - 1, 2)), min(n - 1, 2)),
}
Runs = Sequence[tuple[Scenario, list[Measurement]]]


@dataclass(frozen=True)
class Network:
    """What lies between the hosts of a step, and who shares a core."""

    hosts: int
    bits_per_second: float
    round_trip: float = 0.0
    ranks_per_host: int = 1
    cores: int = 0

    @property
    def ranks_per_core(self) -> float:
        """How many ranks wait for each other's core: on this machine all hosts share two."""
        return max(1.0, self.hosts * self.ranks_per_host / self.cores) if self.cores else 1.0


@dataclass(frozen=True)
class Fit:
    """What a way to communicate makes of a network."""

    way: str
    efficiency: float
    # Times that a byte crosses the network one way, which nothing hides.
    delays: float
    overhead: float

    def end_of_line(self, local: Measurement, parameters: int, network: Network) -> float:
        """Return when the line is through with all buckets."""
        per_parameter, _ = TRAFFIC[self.way](network.hosts)
        wire = per_parameter * parameters * 8 / (self.efficiency * network.bits_per_second)
        return local.median + wire if self.way in AFTER_THE_STEP else line_end(local.ready, wire)

    def step(self, local: Measurement, optimizer: float, parameters: int, network: Network) -> float:
        """Return the seconds of a step that takes those of `local` without communication."""
        return self.step_after(self.end_of_line(local, parameters, network), local, optimizer, network)

    def step_after(self, end: float, local: Measurement, optimizer: float, network: Network) -> float:
        """Return the same where the end of the line is known."""
        _, messages = TRAFFIC[self.way](network.hosts)
        processor = (messages * BUCKETS * MESSAGE_SECONDS + self.overhead) * network.ranks_per_core
        delay = self.delays * network.round_trip / 2
        if self.way in AFTER_THE_STEP:
            return end + BEHIND_THE_LINE * processor + delay
        backward = local.median - statistics.median(local.optimizer_times)
        return max(backward + processor, end + BEHIND_THE_LINE * processor) + optimizer + delay


@dataclass(frozen=True)
class Sample:
    """One measured median and what the model has to know of it."""

    scenario: Scenario
    local: Measurement
    optimizer: float
    parameters: int
    seconds: float

    @property
    def network(self) -> Network:
        """All hosts are on one machine."""
        n = self.scenario
        return Network(n.hosts, n.bits_per_second, n.round_trip, n.ranks_per_host, CORES)

    def error(self, fitted: Fit) -> float:
        """Return model / measurement - 1."""
        return fitted.step(self.local, self.optimizer, self.parameters, self.network) / self.seconds - 1


def samples_of(way: str, runs: Runs) -> list[Sample]:
    """Return the medians of one way on all networks with a limited line; ranks of a host would share its memory."""
    samples = []
    for scenario, measurements in runs:
        by_way = {m.way: m for m in measurements}
        if way not in by_way or not scenario.bits_per_second or scenario.ranks_per_host > 1:
            continue
        local, gloo = by_way["no communication"], by_way["gloo"]
        parameters = round(gloo.bytes_between_hosts / TRAFFIC["gloo"](scenario.hosts)[0])
        # An algorithm that exchanges weights after the step has its exchange in these times.
        optimizer = statistics.median((local if way in AFTER_THE_STEP else by_way[way]).optimizer_times)
        samples.append(Sample(scenario, local, optimizer, parameters, by_way[way].median))
    return samples


def fit(way: str, samples: Sequence[Sample]) -> Fit:
    """Search efficiencies and overheads; the delays that suit them best follow."""
    best = (math.inf, Fit(way, 1.0, 0.0, 0.0))
    measured = np.array([s.seconds for s in samples])
    delays = np.array([s.scenario.round_trip / 2 for s in samples]) / measured
    for efficiency in np.arange(0.6, 1.001, 0.02):
        bare = Fit(way, float(efficiency), 0.0, 0.0)
        ends = [bare.end_of_line(s.local, s.parameters, s.network) for s in samples]
        for overhead in np.arange(0.0, 0.121, 0.005):
            near = Fit(way, float(efficiency), 0.0, float(overhead))
            steps = [near.step_after(e, s.local, s.optimizer, s.network) for e, s in zip(ends, samples, strict=True)]
            errors = np.array(steps) / measured - 1
            count = max(0.0, -float(errors @ delays) / max(float(delays @ delays), 1e-12))
            error = float(np.sum((errors + count * delays) ** 2))
            if error < best[0]:
                best = (error, Fit(way, near.efficiency, count, near.overhead))
    return best[1]


def held_out(way: str, samples: Sequence[Sample]) -> list[float]:
    """Return the error on each network by a fit to all the others."""
    return [sample.error(fit(way, [other for other in samples if other is not sample])) for sample in samples]


def load(path: Path) -> list[tuple[Scenario, list[Measurement]]]:
    """Read what run.py wrote."""
    return [
        (Scenario(**run["scenario"]), [Measurement(**m) for m in run["measurements"]])
        for run in json.loads(path.read_text())["runs"]
    ]


def main() -> None:
    """Fit to the grid, and print how far each prediction is from what was measured."""
    results = Path(sys.argv[1])
    grid, others = load(results / "grid.json"), load(results / "hosts.json")
    predictions = []
    for way in TRAFFIC:
        samples = samples_of(way, grid)
        fitted = fit(way, samples)
        print(f"{way}: efficiency {fitted.efficiency:.2f}, {fitted.delays:.1f} delays, {1e3 * fitted.overhead:.1f} ms")
        own = [s.error(fitted) for s in samples]
        print(f"  fitted to the grid, at most {100 * max(map(abs, own)):.0f} % off")
        new = samples_of(way, others)
        lines = [(s, e, "of the grid, held out") for s, e in zip(samples, held_out(way, samples), strict=True)]
        lines += [(s, s.error(fitted), "another day") for s in new]
        for sample, error, kind in lines:
            predictions.append((error, kind))
            print(f"  {100 * error:+6.1f} %  {1e3 * sample.seconds:7.0f} ms measured  {sample.scenario} ({kind})")
    for kind in ("of the grid, held out", "another day"):
        errors = [error for error, of in predictions if of == kind]
        print(f"{kind}: {sum(abs(error) <= 0.15 for error in errors)} of {len(errors)} predictions are within 15 %")


if __name__ == "__main__":
    main()
