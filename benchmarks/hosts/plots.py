# SPDX-License-Identifier: Apache-2.0
"""Draws what run.py and accuracy.py measured, and what the cost model makes of it: plots.py RESULTS FIGURES."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cost_model import TRAFFIC, fit, samples_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from run import Measurement, Scenario

COLOURS = {
    "no communication": "#888888",
    "gloo": "#b8c4ce",
    "gloo, Adam": "#d9c9e3",
    "gloo, fp16 hook": "#7a8b99",
    "gloo, bf16 hook": "#55636e",
    "gradient_allreduce": "#e8a33d",
    "bytegrad": "#c8102e",
    "qadam": "#7b3fa0",
    "low_precision_decentralized": "#2a7f62",
    "decentralized": "#4a90c2",
    "async": "#a0522d",
}
# Of the model's figure.
RATE = 1e9
Runs = list[tuple[Scenario, list[Measurement]]]


def load(path: Path) -> Runs:
    """Read what run.py wrote."""
    return [
        (Scenario(**run["scenario"]), [Measurement(**m) for m in run["measurements"]])
        for run in json.loads(path.read_text())["runs"]
    ]


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)


def draw_step_times(runs: Runs, path: Path) -> None:
    """Step time against bandwidth, two hosts of one rank."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    chosen = [
        (n, m) for n, m in runs if (n.model, n.hosts, n.ranks_per_host) == ("convolutional", 2, 1) and n.bits_per_second
    ]
    for way in dict.fromkeys(m.way for _, measurements in chosen for m in measurements):
        points = [(n.bits_per_second / 1e6, 1e3 * m.median) for n, ms in chosen for m in ms if m.way == way]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=way, color=COLOURS.get(way))
    axes.set_xscale("log")
    axes.set_yscale("log")
    tidy(axes, "A training step between two hosts, 42 MB of gradients (measured)", "line, Mbit/s", "ms per step")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def draw_model(runs: Runs, path: Path) -> list[str]:
    """Step time against the number of hosts, by the model; return a line for each fit."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    hosts = [8, 16, 32, 64, 128, 256, 512, 1024]
    lines = []
    for way in TRAFFIC:
        samples = [s for s in samples_of(way, runs) if s.scenario.model == "convolutional"]
        fitted = fit(way, runs)
        sample = next(s for s in samples if s.scenario.bits_per_second == RATE)
        times = [1e3 * fitted.step(sample.local, sample.parameters, n, RATE) for n in hosts]
        axes.plot(hosts, times, marker="o", label=way, color=COLOURS[way])
        lines.append(
            f"{way:<30} efficiency {fitted.efficiency:.2f}  overhead {1e3 * fitted.overhead:5.1f} ms  "
            f"error {100 * fitted.error:.0f} %"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(hosts, [str(n) for n in hosts])
    axes.set_ylim(bottom=0)
    tidy(axes, "MODEL, not measured: hosts of one rank at 1 Gbit/s", "hosts", "ms per step")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    return lines


def draw_accuracy(results: list[dict[str, Any]], path: Path) -> None:
    """Test accuracy against time at 100 Mbit/s."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        label = f"{result['way']}: {result['accuracies'][-1]:.4f} after {result['seconds'][-1]:.0f} s"
        axes.plot(result["seconds"], result["accuracies"], marker="o", label=label, color=COLOURS[result["way"]])
    tidy(axes, "Fashion-MNIST, two hosts at 100 Mbit/s (measured)", "seconds of training", "test accuracy")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Draw all that there is."""
    results, figures = Path(sys.argv[1]), Path(sys.argv[2])
    figures.mkdir(parents=True, exist_ok=True)
    runs = load(results / "hosts.json")
    draw_step_times(runs, figures / "step_time.svg")
    print("\n".join(draw_model(runs, figures / "cost_model.svg")))
    accuracy = results / "accuracy.json"
    if accuracy.exists():
        draw_accuracy(json.loads(accuracy.read_text()), figures / "time_to_accuracy.svg")


if __name__ == "__main__":
    main()
