# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/convergence.md and the figure beside it, from the results of all runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plan import SECTIONS, Row, Run, Section

Result = dict[str, Any]
BEGIN = "<!-- tables: written by `make convergence`, not by hand -->"
END = "<!-- end of the tables -->"
HEADER = ("algorithm", "optimizer", "{quality}", "against its baseline", "ranks apart half-way", "bytes sent per step")
SMOOTH = 20  # steps that a point of the figure is the mean of
LOOKS: dict[str, dict[str, Any]] = {
    "DDP without a hook": {"color": "#222222", "linewidth": 2.4},
    "gradient_allreduce": {"color": "#b8c4ce", "linewidth": 1.2},
    "bytegrad": {"color": "#c8102e"},
    "qadam": {"color": "#e8871e"},
    "decentralized, all": {"color": "#1f6fb4"},
    "decentralized, shift_one": {"color": "#5bb5e0", "linestyle": "--"},
    "low_precision_decentralized": {"color": "#2e8b57"},
    "async": {"color": "#8458b3"},
}
OTHER_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"linestyle": ":"},
    "QAdam": {"color": "#f2c14e", "linewidth": 1.4, "linestyle": "--"},
}


class Results:
    """Results by section, row and seed."""

    def __init__(self, by_name: dict[str, Result], seeds: int) -> None:
        self._by_name = by_name
        self.seeds = seeds

    def of(self, section: Section, row: Row) -> list[Result]:
        """One result a seed."""
        return [self._by_name[Run(section.task, section.ranks, row, seed).name] for seed in range(self.seeds)]

    def failed(self, section: Section, row: Row) -> bool:
        return any("error" in result for result in self.of(section, row))


def with_range(values: Sequence[float], style: str) -> str:
    # 0.0 +: a rounded -0.00001 is 0.
    texts = [f"{0.0 + round(value, 4):{style}}" for value in (mean(values), min(values), max(values))]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def bytes_per_step(results: list[Result]) -> str:
    if results[0]["stats"] is None:
        return "not counted"
    return f"{mean(r['stats']['wire_bytes'] / r['stats']['steps'] for r in results):,.0f}"


def line(section: Section, row: Row, results: Results) -> list[str]:
    own, base_row = results.of(section, row), section.baseline_of(row)
    failures = [seed for seed, result in enumerate(own) if "error" in result]
    if failures:
        reasons = [result["error"].strip().splitlines()[-1] for result in own if "error" in result]
        return [row.label, row.optimizer, f"**failed** with seeds {failures}: {reasons[0]}", "", "", ""]
    qualities = [r["quality"] for r in own]
    gaps = ""
    if row != base_row and not results.failed(section, base_row):
        base = [r["quality"] for r in results.of(section, base_row)]
        gaps = with_range([q - b for q, b in zip(qualities, base, strict=True)], "+.4f")
    if not all(map(math.isfinite, qualities)):
        gaps = "**diverged**"
    apart = mean(r["distance"]["half_way"] for r in own)
    return [
        *(row.label, row.optimizer, with_range(qualities, ".4f"), gaps or "is one"),
        *(f"{100 * apart:.2g} %" if apart else "no", bytes_per_step(own)),
    ]


def table(section: Section, results: Results) -> str:
    header = [cell.format(quality=section.task.quality) for cell in HEADER]
    rows = [header, ["---"] * len(header), *(line(section, row, results) for row in section.rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def facts(section: Section, results: Results) -> str:
    """What the rows of a section share."""
    task = section.task
    some = next((r for row in section.rows for r in results.of(section, row) if "error" not in r), None)
    parameters = f"{some['parameters']:,} parameters, " if some else ""
    rates = " and ".join(f"{rate:g} for {optimizer}" for optimizer, rate in task.rates.items())
    text = (
        f"{parameters}{task.epochs} epochs of {task.steps // task.epochs * task.batch:,} examples, {task.steps} steps "
        f"of {task.batch} examples over all ranks, highest learning rate {rates}. {task.better.capitalize()} is better."
    )
    for row in section.rows:
        if row.algorithm == "async" and not results.failed(section, row):
            rounds = mean(r["stats"]["rounds"] for r in results.of(section, row))
            text += f" async averaged the weights {rounds:,.0f} times."
    return text


def replace_tables(page: Path, results: Results) -> None:
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {BEGIN!r} and {END!r}, between which its tables belong")
    parts = [f"### {section.title}\n\n{facts(section, results)}\n\n{table(section, results)}\n" for section in SECTIONS]
    page.write_text(before + BEGIN + "\n\n" + "\n".join(parts) + "\n" + END + after)


def smooth(losses: list[list[float]]) -> list[float]:
    """Mean over the seeds and over `SMOOTH` steps at a time."""
    steps = [mean(values) for values in zip(*losses, strict=True)]
    return [mean(steps[i : i + SMOOTH]) for i in range(0, len(steps) - SMOOTH + 1, SMOOTH)]


def draw_section(section: Section, results: Results, losses: Axes, differences: Axes) -> None:
    for row in section.rows:
        if results.failed(section, row):
            continue
        values = smooth([r["losses"] for r in results.of(section, row)])
        steps = [SMOOTH * i + SMOOTH // 2 for i in range(len(values))]
        look: dict[str, Any] = {"linewidth": 1.4, "label": row.label, **LOOKS[row.label]}
        if row.algorithm is None and row != section.rows[0]:
            look |= {"label": f"{row.label}, {row.optimizer}", **OTHER_OPTIMIZERS[row.optimizer]}
        losses.plot(steps, values, **look)
        base = section.baseline_of(row)
        if row != base and not results.failed(section, base):
            base_values = smooth([r["losses"] for r in results.of(section, base)])
            differences.plot(steps, [v - b for v, b in zip(values, base_values, strict=True)], **look)
    losses.set_title(section.title, loc="left", fontsize=10)
    differences.axhline(0, color="#222222", linewidth=0.8)
    differences.set_xlabel("step")
    for axes in (losses, differences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4")
        axes.set_axisbelow(True)


def draw(results: Results, path: Path) -> None:
    # Text as text, and nothing that changes from one drawing to the next.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bagua", "font.size": 9})
    figure = Figure(figsize=(4.2 * len(SECTIONS), 6.4), layout="constrained")
    axes = figure.subplots(2, len(SECTIONS), sharex="col", squeeze=False)
    for column, section in enumerate(SECTIONS):
        draw_section(section, results, axes[0][column], axes[1][column])
    axes[0][0].set_ylabel("training loss")
    axes[1][0].set_ylabel("training loss less that of the baseline")
    labels: dict[str, Any] = {}
    for top in axes[0]:
        for handle, label in zip(*top.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    lines = [text.rstrip() for text in path.read_text().splitlines()]
    path.write_text(os.linesep.join(lines) + os.linesep)


def write(by_name: dict[str, Result], seeds: int, page: Path, figure: Path) -> None:
    """Replace the tables of the page and draw the figure."""
    results = Results(by_name, seeds)
    replace_tables(page, results)
    draw(results, figure)
