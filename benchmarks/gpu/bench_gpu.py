# SPDX-License-Identifier: Apache-2.0
"""Measures what a GPU is needed for, prints tables, and writes benchmarks/results/gpu.json.

python benchmarks/gpu/bench_gpu.py                       all parts; exit code 2 without a GPU
python benchmarks/gpu/bench_gpu.py codec collectives     some of them
python benchmarks/gpu/bench_gpu.py --device cpu          do the parts work? Tiny sizes, Gloo for NCCL, no file

The README beside this file says what each part shows and what it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bagua
import torch
from bagua.bench.report import size_text
from torch.utils.collect_env import get_nvidia_driver_version, run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[1:1] = [str(HERE.parent), str(ROOT / "tests" / "support")]
RESULTS = HERE.parent / "results" / "gpu.json"

import codec  # noqa: E402  these are found by the lines above
import gpus  # noqa: E402
from contenders import ALGORITHMS  # noqa: E402
from ranks_of_benchmarks import Command, lines_of_the_first, run_all  # noqa: E402
from script_ranks import free_port  # noqa: E402
from tables import table  # noqa: E402

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# Medians of a run differ by as much from one to the next.
NO_SLOWER = 0.95
MOST_COST = 0.03
SECONDS_LIMIT = 1500.0


class Bench:
    """The parts, on one kind of device."""

    def __init__(self, device: str, seconds: float, sizes: Sequence[int], ways: str) -> None:
        self._device = device
        self._seconds = seconds
        self._sizes = sizes
        self._ways = ways
        self._is_gpu = device == "cuda"
        self.stock = "nccl" if self._is_gpu else "gloo"

    def codec(self) -> dict[str, Any]:
        """Encode, decode and the fused mean of every codec, beside a copy."""
        measured = list(codec.lines(self._device, self._sizes))
        print(codec.text(measured))
        return {"target": codec.TARGET, "lines": [asdict(line) for line in measured]}

    def collectives(self) -> dict[str, Any]:
        """Collectives of backend bagua beside those of the stock one, in turns, by python -m bagua.bench."""
        sizes = "-b 4K -e 256M -f 4" if self._is_gpu else "-b 4K -e 64K -f 16 -n 3 -w 1"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bench.json")
            names = [name for name in COLLECTIVES if re.search(self._ways, name)]
            command = ["-m", "bagua.bench", *names, *sizes.split(), "--vs", self.stock, "--json", str(file)]
            count = max(2, gpus.gpu_count() if self._is_gpu else 2)
            ranks, how = self._ranks([*command, "--device", self._device], count)
            run_all(ranks, SECONDS_LIMIT, is_captured=False)
            content = json.loads(file.read_text())
        print(slower_text(content["results"], self.stock))
        return {"ranks": how, **content}

    def hook(self) -> dict[str, Any]:
        """What a hook costs a step of one rank, which has nobody to communicate with."""
        names = [self.stock, f"{self.stock}, QAdam", *ALGORITHMS]
        names = [name for name in names if name == self.stock or re.search(self._ways, name)]
        size = ["cuda:0", "gpt2-small"] if self._is_gpu else ["cpu", "tiny"]
        ranks, _ = self._ranks([str(HERE / "training.py"), *size, str(self._seconds), *names], 1)
        about, *ways = lines_of_the_first(ranks, SECONDS_LIMIT)
        measured = {**about, "ways": ways}
        print(cost_text(measured, self.stock))
        return measured

    def _ranks(self, arguments: list[str], ranks: int) -> tuple[list[Command], str]:
        """Return the processes of ranks that meet on this machine, as torchrun would start them, and their GPUs."""
        placed = gpus.Placement([0] * ranks, [{}] * ranks, f"{ranks} ranks: on the CPU")
        if self._is_gpu:
            placed = gpus.placement_here(ranks)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        commands = []
        for rank, gpu in enumerate(placed.gpus):
            own = {"RANK": str(rank), "LOCAL_RANK": str(gpu), **placed.env[rank]}
            commands.append(
                Command([sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1", **meeting, **own})
            )
        return commands, placed.how


PARTS = {
    "codec": Bench.codec,
    "collectives": Bench.collectives,
    "hook": Bench.hook,
}


def slower_text(results: Sequence[Mapping[str, Any]], stock: str) -> str:
    """Say where backend bagua is slower than the stock one: ratios of medians, taken in turns."""
    compared = [result for result in results if result["ratio"] is not None]
    slower = sorted((r for r in compared if r["ratio"] < NO_SLOWER), key=lambda r: float(r["ratio"]))
    text = (
        f"{len(compared) - len(slower)} of {len(compared)} are no slower than {stock} ({stock} / ours >= {NO_SLOWER})"
    )
    missing = len(results) - len(compared)
    if missing:
        text += f"; {missing} could not be compared"
    return "\n".join([text, *(f"  slower: {r['test']} {size_text(r['size'])}: {r['ratio']:.2f}" for r in slower)])


def cost_text(measured: Mapping[str, Any], stock: str) -> str:
    """Return steps of one rank beside DDP without a hook and with the same optimizer."""
    median = {way["way"]: statistics.median(way["times"]) for way in measured["ways"]}
    rows = []
    for way, seconds in median.items():
        plain = f"{stock}, QAdam" if way in ("qadam", f"{stock}, QAdam") else stock
        cost = seconds / median[plain] - 1
        verdict = "-" if way == plain else "met" if cost <= MOST_COST else f"above {MOST_COST:.0%}"
        rows.append([way, f"{1e3 * seconds:.2f}", plain, f"{cost:+.1%}", verdict])
    return f"{measured['model']}, 1 rank\n" + table(["way", "ms per step", "beside", "more", "target"], rows, left=1)


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    facts: dict[str, Any] = {"bagua": bagua.__version__, "torch": torch.__version__, "device": "cpu"}
    if device == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(),
            "devices": torch.cuda.device_count(),
            "driver": get_nvidia_driver_version(run),
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def write(file: Path, facts: Mapping[str, Any], part: str, measured: Mapping[str, Any]) -> None:
    """Put the part into the file, beside those of earlier runs."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content[part] = {"machine": facts, **measured}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, help="that each way of training is given (20, on the CPU 0.2)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="of codec: bytes of a tensor")
    parser.add_argument("--ways", default="", help="of hook and collectives: those that this regular expression finds")
    parser.add_argument("--json", type=Path, help="file for the figures (benchmarks/results/gpu.json, on the CPU none)")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    is_gpu = args.device == "cuda"
    if is_gpu and gpus.gpu_count() == 0:
        print(f"GPU benchmarks: NOTHING WAS MEASURED {gpus.want_of_a_gpu()}")
        return gpus.NO_GPU
    facts = machine(args.device)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    bench = Bench(args.device, args.seconds or (20.0 if is_gpu else 0.2), args.sizes, args.ways)
    file = args.json or (RESULTS if is_gpu else None)
    for part in args.parts or PARTS:
        print(f"\n== {part}", flush=True)
        measured = PARTS[part](bench)
        if file is not None:
            write(file, facts, part, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
