# SPDX-License-Identifier: Apache-2.0
"""What `make demo` runs: fashion_mnist.py twice, with plain and with 8-bit gradients, side by side.

Prints a table and draws demo.png. Ends with 1 if a run fails or reaches less than 90 % test accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fashion_mnist import DATA, find_data
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SCRIPT = Path(__file__).with_name("fashion_mnist.py")
GOAL = 0.90
RUNS: dict[str, dict[str, bool]] = {"gradient_allreduce": {}, "bytegrad": {"hierarchical": False}}
COLOURS = {"gradient_allreduce": "#b8c4ce", "bytegrad": "#c8102e"}


@dataclass
class Result:
    """What one run wrote."""

    algorithm: str
    test_accuracy: float
    seconds: float
    bytes_per_step: float
    losses: list[float]
    accuracies: list[float]


def run(algorithm: str, args: argparse.Namespace, output: Path) -> Result:
    """Trains under torchrun; its progress bar goes straight to the terminal."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    script = [str(SCRIPT), "--algorithm", algorithm, "--options", json.dumps(RUNS[algorithm])]
    rest = ["--data", str(args.data), "--seed", str(args.seed), "--epochs", str(args.epochs), "--output", str(output)]
    # A rank per core: more threads a rank would only get in each other's way.
    subprocess.run(launcher + script + rest, check=True, env={"OMP_NUM_THREADS": "1"} | os.environ)
    result = json.loads(output.read_text())
    return Result(algorithm, **{k: result[k] for k in Result.__dataclass_fields__ if k != "algorithm"})


def print_table(results: list[Result]) -> None:
    full = results[0].bytes_per_step
    print(f"\n{'algorithm':<20}{'test accuracy':>15}{'seconds':>10}{'bytes sent per step':>22}{'compression':>14}")
    for r in results:
        print(
            f"{r.algorithm:<20}{r.test_accuracy:>15.4f}{r.seconds:>10.1f}{r.bytes_per_step:>22,.0f}"
            f"{full / r.bytes_per_step:>13.2f}x"
        )
    print("Bytes are those that one rank sends; compression is against the first line.")


def smooth(values: list[float], window: int = 25) -> tuple[list[int], list[float]]:
    """Means over `window` steps at a time, with the step in the middle of each."""
    starts = range(0, len(values) - window + 1, window)
    return [s + window // 2 for s in starts], [sum(values[s : s + window]) / window for s in starts]


def tidy(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)


def draw(results: list[Result], ranks: int, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for r, width in zip(results, (5, 2), strict=True):  # the second line lies on the first: the first is the wider
        look: dict[str, Any] = {"color": COLOURS[r.algorithm], "linewidth": width, "markersize": 2 * width + 3}
        left.plot(*smooth(r.losses), label=r.algorithm, **look)
        ends = [(i + 1) * len(r.losses) // len(r.accuracies) for i in range(len(r.accuracies))]
        label = f"{r.algorithm}: {r.test_accuracy:.4f}, {r.bytes_per_step / 1e6:.2f} MB sent per step"
        right.plot(ends, r.accuracies, marker="o", label=label, **look)
    right.axhline(GOAL, color="#888888", linewidth=1, linestyle=":")
    right.set_xlim(left=0)
    lowest, highest = right.get_ylim()
    right.set_ylim(bottom=lowest - 0.4 * (highest - lowest))  # room for the legend
    tidy(left, "Training loss (mean of 25 steps)")
    tidy(right, "Test accuracy after each epoch")
    left.legend(frameon=False)
    right.legend(frameon=False, loc="lower right")
    figure.suptitle(f"Fashion-MNIST, residual network, {ranks} ranks, DistributedDataParallel over bagua")
    figure.savefig(path, dpi=130)


def main() -> str | None:
    """Returns what went wrong, for sys.exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the four files of Fashion-MNIST")
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    find_data(args.data)
    print(f"Training twice on {args.ranks} ranks, {args.epochs} epochs each: about 3 minutes on 2 cores.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = [run(name, args, Path(folder, f"{name}.json")) for name in RUNS]
        except subprocess.CalledProcessError as error:
            return f"The demo stopped: training ended with exit code {error.returncode}; the reason stands above."
    print_table(results)
    draw(results, args.ranks, args.picture)
    print(f"Loss and accuracy of both runs are drawn in {args.picture}.")
    poor = [r.algorithm for r in results if r.test_accuracy < GOAL]
    return f"Warning: the test accuracy of {' and '.join(poor)} is below {GOAL:.2f}." if poor else None


if __name__ == "__main__":
    sys.exit(main())
