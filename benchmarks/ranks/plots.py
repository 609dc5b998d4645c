# SPDX-License-Identifier: Apache-2.0
"""Draws what many_ranks counted, with what the design promises as lines: plots.py RESULTS.json FIGURE.svg."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "all_reduce_4096": "#e8a33d",
    "all_reduce_65536": "#c8102e",
    "all_reduce_1048576": "#7b3fa0",
    "barrier": "#2a7f62",
    "reduce_4096": "#4a90c2",
    "reduce_scatter_1024": "#a0522d",
    "all_to_all_1024": "#888888",
}
# Messages of a rank on n hosts.
PROMISES: dict[str, Callable[[int], float]] = {
    "n - 1": lambda n: n - 1,
    "log n": lambda n: math.log2(n),
}


def panel(axes: Axes, rows: list[dict[str, Any]], field: str, scale: float, title: str) -> None:
    """One quantity over the number of ranks, a line for each operation that has it."""
    for operation, colour in COLOURS.items():
        points = sorted(
            (r["ranks"], scale * r[field]) for r in rows if r["operation"] == operation and r.get(field) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=operation, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({r["ranks"] for r in rows}), [str(n) for n in sorted({r["ranks"] for r in rows})])
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    all_axes = figure.subplots(2, 3).flat
    messages, connections, sent, memory, time, legend = all_axes
    panel(messages, rows, "messages", 1, "messages per rank and operation")
    ranks = sorted({row["ranks"] for row in rows})
    for (name, promise), style in zip(PROMISES.items(), (":", "--"), strict=True):
        messages.plot(ranks, [promise(n) for n in ranks], style, color="black", linewidth=1, label=name)
    panel(connections, rows, "connections", 1, "connections per rank")
    panel(sent, rows, "sent_bytes", 1 / 1024, "KiB sent per rank and operation")
    panel(memory, rows, "private_bytes", 1 / 2**20, "MiB of its own that a rank holds")
    panel(time, rows, "seconds", 1e3, "ms, slowest rank, all ranks on two cores")
    legend.axis("off")
    legend.legend(*messages.get_legend_handles_labels(), frameon=False, loc="center")
    figure.supxlabel("ranks, each on an emulated host of its own")
    figure.savefig(sys.argv[2])


if __name__ == "__main__":
    main()
