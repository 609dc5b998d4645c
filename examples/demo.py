# SPDX-License-Identifier: Apache-2.0
"""What `make demo` runs: fashion_mnist.py twice, with plain and with 8-bit gradients, side by side.

Where hosts can be emulated (as root, with iproute2) it then times some steps between two of them at 100 Mbit/s. Prints
tables and draws demo.png. Ends with 1 if a run fails or reaches less than 90 % test accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.bench.emulated_hosts import Host, Network, NoEmulatedHosts, emulated_hosts
from demo_steps import ALONE
from fashion_mnist import DATA, find_data
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SCRIPT = Path(__file__).with_name("fashion_mnist.py")
STEPS_SCRIPT = Path(__file__).with_name("demo_steps.py")
GOAL = 0.90
RUNS: dict[str, dict[str, bool]] = {"gradient_allreduce": {}, "bytegrad": {"hierarchical": False}}
BETWEEN_HOSTS = Network(bits_per_second=100e6)
# The first steps make connections and group the gradients.
STEPS, FIRST_STEPS = 40, 5
# So few that a step waits for the network, also where the processor is slow or busy.
IMAGES = 8
# What is less may be chance.
GAIN = 1.1
COLOURS = {"gradient_allreduce": "#b8c4ce", "bytegrad": "#c8102e"}
PLAIN, COMPRESSED = RUNS


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


def run_between(hosts: list[Host], output: Path) -> dict[str, float]:
    """Algorithm, or computing alone -> seconds of a step with one rank on each host: the median."""
    script = [sys.executable, str(STEPS_SCRIPT), "--runs", json.dumps(RUNS), "--output", str(output)]
    script += ["--steps", str(STEPS), "--images", str(IMAGES)]
    meeting = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29519"}
    ranks = [
        subprocess.Popen(
            host.command(script),
            env={"OMP_NUM_THREADS": "1"} | host.environment() | meeting | {"RANK": str(number), "LOCAL_RANK": "0"},
        )
        for number, host in enumerate(hosts)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()  # nothing happens to one that has ended
    for code in codes:
        if code != 0:
            raise subprocess.CalledProcessError(code, script)
    return {name: statistics.median(s[FIRST_STEPS:]) for name, s in json.loads(output.read_text()).items()}


def compare_between_hosts(folder: Path) -> dict[str, float]:
    """Times steps between two hosts; nothing where none can be emulated."""
    try:
        with emulated_hosts(2, BETWEEN_HOSTS) as hosts:
            print(
                f"\nTiming {STEPS} steps of each, by turns, between two emulated hosts at {rate()}. Each computes "
                f"{IMAGES} images a step:\nso few that it waits for the network. With more, compression gains less.",
                flush=True,
            )
            return run_between(hosts, folder / "steps.json")
    except NoEmulatedHosts as error:
        print(f"\nNot timed over a slow network, because hosts cannot be emulated here: {error}")
        return {}


def rate() -> str:
    return f"{BETWEEN_HOSTS.bits_per_second / 1e6:.0f} Mbit/s"


def print_steps(steps: dict[str, float]) -> None:
    print(f"\n{'algorithm':<20}{'ms per step':>15}{'speed':>10}   (2 hosts, {rate()}, {IMAGES} images on each)")
    for name in RUNS:
        print(f"{name:<20}{1e3 * steps[name]:>15.0f}{steps[PLAIN] / steps[name]:>9.2f}x")
    print(f"{ALONE:<20}{1e3 * steps[ALONE]:>15.0f}")


def gain(steps: dict[str, float], plain_bytes: float) -> str:
    """What a user with such a network gains, in a sentence. `plain_bytes` are those of a step without compression."""
    speed = steps[PLAIN] / steps[COMPRESSED]
    plain, compressed, alone = (f"{1e3 * steps[name]:.0f} ms" for name in (PLAIN, COMPRESSED, ALONE))
    if speed >= GAIN:
        return f"At {rate()} a step took {plain} with {PLAIN} and {compressed} with {COMPRESSED}: {speed:.1f}x as fast."
    network = 8 * plain_bytes / BETWEEN_HOSTS.bits_per_second
    return (
        f"Nothing was gained at {rate()}: a step took {plain} with {PLAIN}, {compressed} with {COMPRESSED}. This "
        f"machine was too busy, or is too slow: computing alone took {alone} of that, and the network needs "
        f"{1e3 * network:.0f} ms for the gradients of {PLAIN}."
    )


def print_table(results: list[Result]) -> None:
    full = results[0].bytes_per_step
    print(f"\n{'algorithm':<20}{'test accuracy':>15}{'seconds':>10}{'bytes sent per step':>22}{'compression':>14}")
    for r in results:
        print(
            f"{r.algorithm:<20}{r.test_accuracy:>15.4f}{r.seconds:>10.1f}{r.bytes_per_step:>22,.0f}"
            f"{full / r.bytes_per_step:>13.2f}x"
        )
    print(
        "Bytes are those that one rank sends; compression is against the first line. Seconds depend on the processor:"
    )
    print("on one machine there is no slow network, and compression costs time.")


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


def draw_steps(axes: Axes, steps: dict[str, float]) -> None:
    axes.axhline(1e3 * steps[ALONE], color="#555555", linewidth=1, linestyle=":", label=ALONE)
    bars = axes.bar(list(RUNS), [1e3 * steps[name] for name in RUNS], color=[COLOURS[name] for name in RUNS], width=0.6)
    for label in axes.bar_label(bars, fmt="%.0f ms", padding=2):
        label.set_bbox({"color": "white", "pad": 1})
    axes.legend(frameon=False, loc="upper right")
    axes.margins(y=0.3)
    tidy(axes, f"Time of a step at {rate()}")
    axes.set_xlabel(f"2 emulated hosts, {IMAGES} images a step on each")
    axes.set_ylabel("ms")


def draw(results: list[Result], steps: dict[str, float], ranks: int, path: Path) -> None:
    figure = Figure(figsize=(14 if steps else 10, 4), layout="constrained")
    if steps:
        left, right, last = figure.subplots(1, 3, width_ratios=[3, 3, 2])
        draw_steps(last, steps)
    else:
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
    print(f"Training twice on {args.ranks} ranks, {args.epochs} epochs each: 3 to 7 minutes on 2 cores.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = [run(name, args, Path(folder, f"{name}.json")) for name in RUNS]
            print_table(results)
            steps = compare_between_hosts(Path(folder))
        except subprocess.CalledProcessError as error:
            return f"The demo stopped: training ended with exit code {error.returncode}; see the error above."
    if steps:
        print_steps(steps)
        print(gain(steps, results[0].bytes_per_step))
    draw(results, steps, args.ranks, args.picture)
    print(f"Loss and accuracy of both runs are drawn in {args.picture}{', with the times of a step' if steps else ''}.")
    poor = [r.algorithm for r in results if r.test_accuracy < GOAL]
    return f"Warning: the test accuracy of {' and '.join(poor)} is below {GOAL:.2f}." if poor else None


if __name__ == "__main__":
    sys.exit(main())
