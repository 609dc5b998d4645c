# SPDX-License-Identifier: Apache-2.0
"""Draws what run.py and time_to_loss.py measured, for the pages: plots.py RESULTS FIGURES."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
from cost_model import load
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from run import Fragile, Measurement, Scenario

COLOURS = {
    "no communication": "#888888",
    "gloo": "#b8c4ce",
    "gloo, fp16 hook": "#7a8b99",
    "bytegrad": "#c8102e",
    "quantized_allreduce, 4bit": "#e0707c",
}
# Where the colour of a line is too pale for letters.
TEXT_COLOURS = {"gloo": "#6b7b88", "no communication": "#666666"}
RATES = {100e6: "100 Mbit/s", 1e9: "1 Gbit/s", 10e9: "10 Gbit/s"}
Runs = list[tuple[Scenario, list[Measurement]]]
NAMES = {
    "gloo": "Gloo (DDP as it is)",
    "gloo, Adam": "Gloo, Adam",
    "gloo, fp16 hook": "Gloo, fp16 hook",
    "gloo, bf16 hook": "Gloo, bf16 hook",
    "gloo, PowerSGD hook, rank 1": "Gloo, torch's PowerSGD hook, rank 1",
    "gloo, PowerSGD hook, rank 4": "Gloo, torch's PowerSGD hook, rank 4",
}


class Cell(NamedTuple):
    """Milliseconds per step, and how many times as fast as Gloo; None and NaN where it never came to an end."""

    ms: float | None
    ratio: float


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)


# Five of them, so that each line can carry its name; benchmarks/LOG.md has the figures of all.
STEP_TIME_WAYS = ("gloo", "gloo, fp16 hook", "bytegrad", "quantized_allreduce, 4bit", "no communication")


def spread(heights: list[float], apart: float) -> list[float]:
    """Return heights of texts, in the same order from the top, none closer than `apart` to the next."""
    placed: dict[int, float] = {}
    previous = math.inf
    for index in sorted(range(len(heights)), key=lambda index: -heights[index]):
        previous = placed[index] = min(heights[index], previous - apart)
    return [placed[index] for index in range(len(heights))]


def draw_step_times(runs: Runs, path: Path) -> None:
    """Step time against bandwidth, two hosts of one rank."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    chosen = sorted(
        (
            (n.bits_per_second, {m.way: 1e3 * m.median for m in measurements})
            for n, measurements in runs
            if (n.model, n.hosts, n.ranks_per_host) == ("convolutional", 2, 1) and n.bits_per_second
        ),
        key=lambda run: run[0],
    )
    rates = [rate for rate, _ in chosen]
    for way in STEP_TIME_WAYS:
        axes.plot(rates, [times[way] for _, times in chosen], marker="o", color=COLOURS[way])
    # Names stand at the left ends, which lie furthest apart; there is room for them beside the first rate.
    ends = spread([math.log10(chosen[0][1][way]) for way in STEP_TIME_WAYS], 0.09)
    for way, height in zip(STEP_TIME_WAYS, ends, strict=True):
        axes.annotate(
            NAMES.get(way, way),
            (rates[0], 10**height),
            (-9, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
            color=TEXT_COLOURS.get(way, COLOURS[way]),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=rates[0] / 10)
    axes.set_xticks(rates, [RATES[rate] for rate in rates])
    axes.set_yticks([50, 100, 200, 500, 1000, 2000, 5000], ["50", "100", "200", "500", "1,000", "2,000", "5,000"])
    axes.minorticks_off()
    tidy(
        axes, "A training step between two hosts, 42 MB of gradients (measured)", "speed of the network", "ms per step"
    )
    figure.savefig(path)


def fragile_of(path: Path) -> dict[Scenario, list[Fragile]]:
    """Read how torch's PowerSGD hook fared on each network."""
    tried = {}
    for run in json.loads(path.read_text())["runs"]:
        tried[Scenario(**run["scenario"])] = [
            Fragile(**{**f, "measurements": [Measurement(**m) for m in f["measurements"]]}) for f in run["fragile"]
        ]
    return tried


def cells_of(measurements: list[Measurement], tried: list[Fragile]) -> dict[str, Cell]:
    """Return milliseconds and Gloo / this of each way; torch's PowerSGD hook ran apart, right afterwards."""
    times = {m.way: m.median for m in measurements}
    cells = {way: Cell(1e3 * time, times["gloo"] / time) for way, time in times.items() if way != "no communication"}
    for fragile in tried:
        own = [m.median for m in fragile.measurements if m.way == fragile.way]
        cells[fragile.way] = Cell(1e3 * own[0], times["gloo"] / own[0]) if own else Cell(None, math.nan)
    return cells


def draw_grid(runs: Runs, tried: dict[Scenario, list[Fragile]], path: Path) -> None:
    """A step's milliseconds for every way on every network, coloured by how many times as fast as Gloo it is."""
    runs = sorted(runs, key=lambda run: (run[0].bits_per_second, run[0].round_trip))
    columns = [cells_of(measurements, tried[scenario]) for scenario, measurements in runs]
    # The slowest first; a NaN would spoil the order.
    ways = sorted(columns[0], key=lambda way: sum(math.log(c[way].ratio) for c in columns if c[way].ms))
    figure = Figure(figsize=(10, 0.36 * len(ways) + 1.2), layout="constrained")
    axes = figure.subplots()
    logs = [[math.log2(c[way].ratio) for c in columns] for way in ways]
    image = axes.imshow(logs, cmap="RdBu", vmin=-4, vmax=4, aspect="auto")
    for row, way in enumerate(ways):
        for column, cells in enumerate(columns):
            cell = cells[way]
            text = "failed" if cell.ms is None else f"{cell.ms:.0f}"
            colour = "white" if abs(logs[row][column]) > 2.6 else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)
    axes.set_yticks(range(len(ways)), [NAMES.get(way, way) for way in ways], fontsize=9)
    labels = [f"{RATES[n.bits_per_second]}\n{1e3 * n.round_trip:.0f} ms" for n, _ in runs]
    axes.set_xticks(range(len(runs)), labels, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, ticks=[-3, -2, -1, 0, 1, 2, 3], fraction=0.03, pad=0.01)
    bar.ax.set_yticklabels(["1/8", "1/4", "1/2", "as Gloo", "2", "4", "8 times"], fontsize=8)
    figure.suptitle(
        "Milliseconds per training step, two hosts, 42 MB of gradients (measured); columns: rate and round trip"
        + "".join(f", {word}" for word in runs[0][0].network.troubles()),
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figure.savefig(path)


# The first picture: what a reader has, and the two ways to begin with.
BAR_WAYS = ("gloo", "gloo, fp16 hook", "bytegrad", "quantized_allreduce, 4bit")
BAR_NETWORKS = ((1e9, 0.0), (1e9, 0.05), (100e6, 0.05))


def draw_bars(runs: Runs, path: Path) -> None:
    """Draw a step of four ways on three networks."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    names = {**NAMES, "bytegrad": "bytegrad, 8 bits", "quantized_allreduce, 4bit": "quantized_allreduce, 4 bits"}
    every_axes = figure.subplots(1, len(BAR_NETWORKS))
    for axes, (rate, round_trip) in zip(every_axes, BAR_NETWORKS, strict=True):
        measurements = next(ms for n, ms in runs if (n.bits_per_second, n.round_trip) == (rate, round_trip))
        by_way = {m.way: m for m in measurements}
        times = [1e3 * by_way[way].median for way in BAR_WAYS]
        bars = axes.barh(range(len(times)), times, color=[COLOURS[way] for way in BAR_WAYS])
        axes.bar_label(bars, [f"{time:,.0f} ms" for time in times], padding=3, fontsize=9)
        axes.set_yticks(
            range(len(times)), [names[way] for way in BAR_WAYS] if axes is every_axes[0] else [], fontsize=9
        )
        axes.invert_yaxis()
        axes.set_xlim(0, 1.35 * max(times))
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.set_title(f"{RATES[rate]}, {1e3 * round_trip:.0f} ms round trip", fontsize=10, loc="left")
    figure.savefig(path)


def draw_time_to_loss(measured: dict[str, Any], path: Path) -> None:
    """Training loss against time."""
    figure = Figure(figsize=(7.5, 5.6), layout="constrained")
    axes = figure.subplots()
    runs: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(measured["results"], key=lambda result: -result["seconds"]):
        runs.setdefault(result["contender"], []).append(result)
    for number, (contender, of_it) in enumerate(runs.items()):
        seconds, loss = (mean(run[value] for run in of_it) for value in ("seconds", "validation_loss"))
        label = f"{contender}: {loss:.3f} after {seconds:.0f} s" + (f" (n={len(of_it)})" if len(of_it) > 1 else "")
        style = {"color": f"C{number % 10}", "linestyle": "-:"[number // 10]}
        for run in of_it:
            axes.plot(run["ends"], run["losses"], label=label if run is of_it[0] else None, **style)
    axes.set_xscale("log")
    axes.set_ylim(2.3, 3.6)
    tidy(axes, f"A transformer of 13 MB, two hosts, {measured['network']} (measured)", "seconds", "training loss")
    figure.legend(frameon=False, fontsize=8, title="held-out loss at the end", loc="outside lower center", ncols=2)
    figure.savefig(path)


def main() -> None:
    # Labels stay text, which a reader can search, and a file is a fraction as long.
    matplotlib.rcParams["svg.fonttype"] = "none"
    results, figures = Path(sys.argv[1]), Path(sys.argv[2])
    figures.mkdir(parents=True, exist_ok=True)
    grid = results / "grid.json"
    draw_grid(load(grid), fragile_of(grid), figures / "grid.svg")
    draw_bars(load(results / "grid_cubic.json"), figures / "bars.svg")
    draw_step_times(load(results / "hosts.json"), figures / "step_time.svg")
    draw_time_to_loss(json.loads((results / "time_to_loss.json").read_text()), figures / "time_to_loss.svg")


if __name__ == "__main__":
    main()
