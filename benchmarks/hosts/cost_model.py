# SPDX-License-Identifier: Apache-2.0
"""Fits the prices of bagua.bench.cost_model to the grid, and writes them with how far predictions can be relied on.

    python benchmarks/hosts/cost_model.py benchmarks/results [MORE.json]

Fitted by least squares of relative errors to grid.json, two hosts on nine networks. hosts.json, of another day and with
other hosts, models and networks, and MORE.json take no part: their errors are those of predictions, and so are those of
each network of the grid by a fit to the other eight. To grid_cubic.json and grid_loss.json, of another machine, what
cubic and losses cost is fitted, by hand: five numbers in bagua.bench.cost_model. How fast a file's processor is, which
`plan` measures, is told by its steps of the convolutional network without communication. Writes prices.json into the
package, and prediction.md.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from bagua import _C
from bagua._attachment import names_and_roles
from bagua._message_bytes import Parameter, coded_bytes, parameters_of
from bagua.bench.cost_model import WAYS, Line, Price, Step, step_seconds
from bagua.bench.plan import PRICES, options_of_way
from run import Measurement, Scenario

sys.path.insert(0, str(Path(__file__).parents[1]))
from contenders import MODELS

CORES = 2
TABLE = Path(__file__).parents[1] / "results" / "prediction.md"
_GOOD = 0.15
_DELAYS = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 12.0, 15.0, 18.0, 22.0, 25.0, 28.0]
Runs = Sequence[tuple[Scenario, list[Measurement]]]


@dataclass(frozen=True)
class Sample:
    """One measured median and what the model has to know of it."""

    scenario: Scenario
    step: Step
    sent: float
    seconds: float
    steps: int
    slowness: float

    @property
    def line(self) -> Line:
        """All hosts are on one machine."""
        n = self.scenario
        return Line(n.hosts, n.bits_per_second, n.round_trip, _ranks_per_core(n), n.loss, n.congestion == "cubic")

    def error(self, way: str, price: Price) -> float:
        """Return model / measurement - 1."""
        return step_seconds(way, price, self.step, self.sent, self.line, self.slowness) / self.seconds - 1


def _ranks_per_core(scenario: Scenario) -> float:
    return max(1.0, scenario.hosts * scenario.ranks_per_host / CORES)


def seconds_alone(runs: Runs) -> float:
    """Return a step of the convolutional network without communication, the median of all of a file's lines."""
    return statistics.median(
        statistics.median(m.times) / _ranks_per_core(scenario)
        for scenario, measurements in runs
        for m in measurements
        if m.way == "no communication" and scenario.model == "convolutional"
    )


def _model(name: str) -> list[Parameter]:
    network, _ = MODELS[name]()
    return parameters_of(network.parameters(), names_and_roles(network, list(network.parameters())))


def samples_of(way: str, runs: Runs, models: Mapping[str, list[Parameter]], reference: float) -> list[Sample]:
    """Return the medians of one way on all networks with a limited line; ranks of a host would share its memory.

    `reference` is seconds_alone() on the processor of the prices.
    """
    samples = []
    slowness = seconds_alone(runs) / reference
    for scenario, measurements in runs:
        by_way = {m.way: m for m in measurements}
        if way not in by_way or not scenario.bits_per_second or scenario.ranks_per_host > 1:
            continue
        parameters = models[scenario.model]
        compute = statistics.median(by_way["no communication"].times)
        algorithm, options = options_of_way(way)
        sent = coded_bytes(_C.check_options(algorithm, options), parameters) if algorithm else _stock(way, parameters)
        step = Step.of(parameters, compute)
        samples.append(Sample(scenario, step, sent, by_way[way].median, len(by_way[way].times), slowness))
    return samples


def _stock(way: str, parameters: Sequence[Parameter]) -> float:
    return sum(p.nbytes for p in parameters) / (2 if "16" in way else 1)


def fit(way: str, samples: Sequence[Sample]) -> Price:
    """Search the prices that are least wrong."""
    best = (math.inf, Price(1.0, 0.0, 0.0))
    far = [s.scenario.round_trip for s in samples]
    for efficiency, nanoseconds in itertools.product(np.arange(0.7, 1.001, 0.05), np.arange(0.0, 12.01, 0.5)):
        for delays in _DELAYS if any(far) else [0.0]:
            price = Price(round(float(efficiency), 2), delays, float(nanoseconds))
            error = sum(sample.error(way, price) ** 2 for sample in samples)
            if error < best[0]:
                best = (error, price)
    return best[1]


def load(path: Path) -> list[tuple[Scenario, list[Measurement]]]:
    """Read what run.py wrote."""
    return [
        (Scenario(**run["scenario"]), [Measurement(**m) for m in run["measurements"]])
        for run in json.loads(path.read_text())["runs"]
    ]


def main() -> None:
    """Fit to the grid, and write how far each prediction is from what was measured."""
    results = Path(sys.argv[1])
    kinds = {"the grid, held out": load(results / "grid.json"), "another day": load(results / "hosts.json")}
    kinds["cubic, 50 ms of buffer, on a machine of slower cores"] = load(results / "grid_cubic.json")
    kinds["0.1 % of packets lost, on that machine"] = load(results / "grid_loss.json")
    for path in map(Path, sys.argv[2:]):
        kinds[path.stem] = load(path)
    models = {scenario.model: _model(scenario.model) for runs in kinds.values() for scenario, _ in runs}
    prices = {}
    reference = seconds_alone(kinds["the grid, held out"])
    errors: dict[str, dict[tuple[Scenario, str], tuple[float, Sample]]] = {kind: {} for kind in kinds}
    for way in WAYS:
        samples = {kind: samples_of(way, runs, models, reference) for kind, runs in kinds.items()}
        grid, *others = samples
        price = prices[way] = fit(way, samples[grid])
        for sample in samples[grid]:
            held = fit(way, [other for other in samples[grid] if other is not sample])
            errors[grid][sample.scenario, way] = sample.error(way, held), sample
        for kind in others:
            errors[kind] |= {(s.scenario, way): (s.error(way, price), s) for s in samples[kind]}
    PRICES.write_text(json.dumps({way: asdict(price) for way, price in prices.items()}, indent=1) + "\n")
    TABLE.write_text(_report(errors))
    print(TABLE.read_text())


def _report(errors: Mapping[str, Mapping[tuple[Scenario, str], tuple[float, Sample]]]) -> str:
    text = "# Predictions of a step, against what was measured\n\n"
    text += "Written by `python benchmarks/hosts/cost_model.py benchmarks/results`. A cell is prediction / "
    text += "measurement - 1 in percent, and the milliseconds measured, the median of so many steps.\n"
    for kind, cells in errors.items():
        found = [abs(error) for error, _ in cells.values()]
        good = sum(e <= _GOOD for e in found)
        slowness = next(iter(cells.values()))[1].slowness
        text += f"\n## {kind}\n\nThe processor took {slowness:.2f} times as long as that of the grid. "
        text += f"{good} of {len(found)} predictions are within 15 %, half of them within "
        text += f"{100 * statistics.median(found):.0f} %, the worst is {100 * max(found):.0f} % off.\n\n"
        text += f"| line | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}\n"
        for scenario in dict.fromkeys(scenario for scenario, _ in cells):
            row = [cells.get((scenario, way)) for way in WAYS]
            shown = [f"{100 * c[0]:+.0f} ({1e3 * c[1].seconds:.0f} ms, n={c[1].steps})" if c else "" for c in row]
            text += f"| {scenario} | {' | '.join(shown)} |\n"
    return text


if __name__ == "__main__":
    main()
