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

RANKS = (2, 4, 8)
BYTES = 4 << 20
OUTPUT = Path(__file__).parents[1] / "docs" / "bytes_per_parameter.svg"
# Label -> (test, options).
ROWS = {
    "gradient_allreduce": ("gradient_allreduce", []),
    "bytegrad": ("bytegrad", []),
    "qadam, after warm-up": ("qadam", []),
    'decentralized, "all"': ("decentralized", []),
    'decentralized, "shift_one"': ("decentralized", ["-o", "peer_selection_mode=shift_one"]),
    "low_precision_decentralized": ("low_precision_decentralized", []),
}


def sent_per_parameter(test: str, options: list[str], ranks: int) -> float:
    """Measure one bar."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        size = ["-b", str(BYTES), "-e", str(BYTES), "-n", "4", "-w", "0", "--ranks", str(ranks), "--device", "cpu"]
        command = [sys.executable, "-m", "bagua.bench", test, *size, *options, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (result,) = json.loads(file.read_text())["results"]
    return float(result["wire_bytes"]) / int(result["count"])


def main() -> None:
    """Measure and draw."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    height = 0.8 / len(RANKS)
    for index, ranks in enumerate(RANKS):
        values = [sent_per_parameter(test, options, ranks) for test, options in ROWS.values()]
        places = [row + index * height for row in range(len(ROWS))]
        bars = axes.barh(
            places, values, height, label=f"{ranks} ranks", color=pyplot.colormaps["Blues"](0.4 + 0.2 * index)
        )
        axes.bar_label(bars, fmt="%.2f", fontsize="x-small", padding=2)
    axes.set_yticks([row + height for row in range(len(ROWS))], list(ROWS))
    axes.invert_yaxis()
    axes.set_xlabel("bytes that a rank sends per step and parameter of 4 bytes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(OUTPUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
