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
from bagua.bench import cost_model
from bagua.bench.cost_model import WAYS, Line, Price, Step, step_seconds
from bagua.bench.plan import PRICES, options_of_way
from run import Measurement, Scenario

sys.path.insert(0, str(Path(__file__).parents[1]))
from contenders import MODELS

CORES = 2
TABLE = Path(__file__).parents[1] / "results" / "prediction.md"
_GOOD = 0.15
_CUBIC, _LOSSES = "cubic, 50 ms of buffer, on a machine of slower cores", "0.1 % of packets lost, on that machine"
# Constants of bagua.bench.cost_model that are fitted to the lines of a kind, and what they are tried with.
_FITTED = {
    _CUBIC: {"_YIELDED": [4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0]},
    _LOSSES: {"_CONNECTION_RATE": [7e6, 8e6, 9e6, 10e6, 11e6, 12e6], "_LAST_PACKETS": [1.0, 2.0, 3.0, 4.0]},
}
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


def good_without_own_line(
    samples: Mapping[str, Sequence[Sample]], prices: Mapping[str, Price], constants: Mapping[str, Sequence[float]]
) -> int:
    """Return how many predictions are good where these constants are those that suit all other lines best."""
    own = {name: getattr(cost_model, name) for name in constants}
    errors = {}
    for values in itertools.product(*constants.values()):
        vars(cost_model).update(zip(constants, values, strict=True))
        errors[values] = [(s.scenario, s.error(way, prices[way])) for way in samples for s in samples[way]]
    vars(cost_model).update(own)

    def of_others(values: tuple[float, ...], line: Scenario) -> float:
        return sum(error**2 for scenario, error in errors[values] if scenario != line)

    good = 0
    for line in {scenario for scenario, _ in errors[values]}:
        best = min(errors, key=lambda values, line=line: of_others(values, line))
        good += sum(abs(error) <= _GOOD for scenario, error in errors[best] if scenario == line)
    return good


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
    kinds |= {_CUBIC: load(results / "grid_cubic.json"), _LOSSES: load(results / "grid_loss.json")}
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
    held_out = {
        kind: good_without_own_line(
            {way: samples_of(way, kinds[kind], models, reference) for way in WAYS}, prices, tried
        )
        for kind, tried in _FITTED.items()
    }
    PRICES.write_text(json.dumps({way: asdict(price) for way, price in prices.items()}, indent=1) + "\n")
    TABLE.write_text(_report(errors, held_out))
    print(TABLE.read_text())


def _report(
    errors: Mapping[str, Mapping[tuple[Scenario, str], tuple[float, Sample]]], held_out: Mapping[str, int]
) -> str:
    text = "# Predictions of a step, against what was measured\n\n"
    text += "Written by `python benchmarks/hosts/cost_model.py benchmarks/results`. A cell is prediction / "
    text += "measurement - 1 in percent, and the milliseconds measured, the median of so many steps.\n"
    for kind, cells in errors.items():
        found = [abs(error) for error, _ in cells.values()]
        good = sum(e <= _GOOD for e in found)
        slowness = next(iter(cells.values()))[1].slowness
        text += f"\n## {kind}\n\nThe processor took {slowness:.2f} times as long as that of the grid. "
        text += f"{good} of {len(found)} predictions are within 15 %, half of them within "
        text += f"{100 * statistics.median(found):.0f} %, the worst is {100 * max(found):.0f} % off.\n"
        if kind in held_out:
            names = ", ".join(_FITTED[kind])
            text += f"With {names} of the model fitted to the other lines alone, {held_out[kind]} are within 15 %.\n"
        text += f"\n| line | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}\n"
        for scenario in dict.fromkeys(scenario for scenario, _ in cells):
            row = [cells.get((scenario, way)) for way in WAYS]
            shown = [f"{100 * c[0]:+.0f} ({1e3 * c[1].seconds:.0f} ms, n={c[1].steps})" if c else "" for c in row]
            text += f"| {scenario} | {' | '.join(shown)} |\n"
    return text


if __name__ == "__main__":
    main()
