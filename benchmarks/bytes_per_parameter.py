# SPDX-License-Identifier: Apache-2.0
"""Draws docs/bytes_per_parameter.svg: what a rank sends per step and parameter, counted by the algorithms themselves.

python benchmarks/bytes_per_parameter.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

RANKS = (2, 4)
BYTES = 1 << 20
OUTPUT = Path(__file__).parents[1] / "docs" / "bytes_per_parameter.svg"
# Of those whose messages depend on the shape of a gradient.
MATRIX = "layer.weight 512x512"
# What runs together: label -> test, and options.
RUNS: list[tuple[dict[str, str], list[str]]] = [
    (
        {
            "gradient_allreduce": "gradient_allreduce",
            'decentralized, "all"': "decentralized",
            "low_precision_decentralized": "low_precision_decentralized",
            "bytegrad": "bytegrad",
            "qadam, after warm-up": "qadam",
        },
        [],
    ),
    ({'decentralized, "shift_one"': "decentralized"}, ["-o", "peer_selection_mode=shift_one"]),
    (
        {"quantized_allreduce, 4 bits": "quantized_allreduce", "powersgd, rank 4, 512 x 512": "powersgd"},
        ["-o", "start_step=0", "--sizes", MATRIX],
    ),
]


def sent_per_parameter(ranks: int) -> dict[str, float]:
    """Measure the bars of one number of ranks."""
    bars: dict[str, float] = {}
    for tests, options in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            file, sizes = Path(folder, "figures.json"), Path(folder, "sizes.txt")
            sizes.write_text(MATRIX)
            size = [] if MATRIX in options else ["-b", str(BYTES), "-e", str(BYTES)]
            size += [str(sizes) if option == MATRIX else option for option in options]
            how = ["-n", "4", "-w", "0", "--ranks", str(ranks), "--device", "cpu", "--json", str(file)]
            command = [sys.executable, "-m", "bagua.bench", *tests.values(), *size, *how]
            subprocess.run(command, check=True)
            results = json.loads(file.read_text())["results"]
        sent = {result["test"]: result["wire_bytes"] / result["count"] for result in results}
        bars |= {label: sent[test] for label, test in tests.items()}
    return bars


def main() -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    height = 0.8 / len(RANKS)
    labels: list[str] = []
    for index, ranks in enumerate(RANKS):
        bars_of_ranks = sent_per_parameter(ranks)
        labels = sorted(bars_of_ranks, key=lambda label: bars_of_ranks[label], reverse=True) if index == 0 else labels
        values = [bars_of_ranks[label] for label in labels]
        places = [row + index * height for row in range(len(labels))]
        bars = axes.barh(
            places, values, height, label=f"{ranks} ranks", color=pyplot.colormaps["Blues"](0.4 + 0.2 * index)
        )
        axes.bar_label(bars, fmt="%.2f", fontsize="x-small", padding=2)
    axes.set_yticks([row + height / 2 for row in range(len(labels))], labels)
    axes.invert_yaxis()
    axes.set_xlabel("bytes that a rank sends per step and parameter of 4 bytes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(OUTPUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
