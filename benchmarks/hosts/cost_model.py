# SPDX-License-Identifier: Apache-2.0
"""A model of what a training step costs between many hosts, fitted on what run.py measured. A model, not a measurement.

    step = max(compute, end of the line at efficiency * bandwidth + optimizer) + messages * latency + overhead

`compute`, the optimizer's part of it and when each bucket is ready are measured without communication. `bytes` and
`messages` per rank follow from the algorithm and the number of hosts; `efficiency` and `overhead` of each way are
fitted by least squares to the networks of two hosts with a limited line. The `latency` of a message is assumed:
emulated hosts that share two cores tell nothing of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from run import Measurement, Scenario, line_end

# Bytes per parameter and messages per bucket that a rank sends among n hosts.
TRAFFIC: dict[str, Callable[[int], tuple[float, float]]] = {
    # A ring: n - 1 steps of reduce-scatter, n - 1 of all-gather.
    "gloo": lambda n: (8 * (n - 1) / n, 2 * (n - 1)),
    "gloo, fp16 hook": lambda n: (4 * (n - 1) / n, 2 * (n - 1)),
    "gradient_allreduce": lambda n: (8 * (n - 1) / n, 2 * (n - 1)),
    "bytegrad": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    # Both neighbours, who are one and the same between two hosts.
    "low_precision_decentralized": lambda n: (float(min(n - 1, 2)), min(n - 1, 2)),
}
AFTER_THE_STEP = ("low_precision_decentralized",)
BUCKETS = 8
LATENCY = 1e-4


@dataclass(frozen=True)
class Fit:
    """What a way to communicate costs beyond its bytes."""

    way: str
    efficiency: float
    overhead: float
    # Root mean square of (model / measurement - 1).
    error: float

    def step(self, local: Measurement, parameters: int, hosts: int, bits_per_second: float) -> float:
        """Return the seconds of a step that takes those of `local` without communication."""
        per_parameter, messages = TRAFFIC[self.way](hosts)
        wire = per_parameter * parameters * 8 / (self.efficiency * bits_per_second)
        if self.way in AFTER_THE_STEP:
            busy = local.median + wire
        else:
            busy = max(local.median, line_end(local.ready, wire) + statistics.median(local.optimizer_times))
        return busy + messages * BUCKETS * LATENCY + self.overhead


@dataclass(frozen=True)
class Sample:
    """One measured median and what the model has to know of it."""

    scenario: Scenario
    local: Measurement
    parameters: int
    seconds: float


def samples_of(way: str, runs: list[tuple[Scenario, list[Measurement]]]) -> list[Sample]:
    """Return the medians of one way on all networks that the model describes."""
    samples = []
    for scenario, measurements in runs:
        by_way = {m.way: m for m in measurements}
        if way not in by_way or not scenario.bits_per_second or scenario.hosts * scenario.ranks_per_host != 2:
            continue
        local, gloo = by_way["no communication"], by_way["gloo"]
        parameters = round(gloo.bytes_between_hosts / TRAFFIC["gloo"](scenario.hosts)[0])
        samples.append(Sample(scenario, local, parameters, by_way[way].median))
    return samples


def fit(way: str, runs: list[tuple[Scenario, list[Measurement]]]) -> Fit:
    """Search the efficiencies; the overhead that suits each best is its mean residual."""
    samples = samples_of(way, runs)
    best: Fit | None = None
    for efficiency in np.arange(0.6, 1.001, 0.02):
        bare = Fit(way, float(efficiency), 0.0, 0.0)
        modelled = [bare.step(s.local, s.parameters, s.scenario.hosts, s.scenario.bits_per_second) for s in samples]
        weights = [1 / s.seconds for s in samples]
        residuals = [s.seconds - m for s, m in zip(samples, modelled, strict=True)]
        overhead = max(0.0, float(np.average(residuals, weights=weights)))
        relative = [(m + overhead) / s.seconds - 1 for s, m in zip(samples, modelled, strict=True)]
        error = float(np.sqrt(np.mean(np.square(relative))))
        if best is None or error < best.error:
            best = Fit(way, float(efficiency), overhead, error)
    assert best is not None
    return best
