# SPDX-License-Identifier: Apache-2.0
"""Times single calls of all_reduce between the ranks of one host, of bagua and of Gloo in turns.

torchrun --standalone --nproc-per-node 2 benchmarks/in_host/single_calls.py [FILE]      writes its medians into FILE

`python -m bagua.bench` times runs of calls, whose mean a few slow ones decide. Here the two take turns of three calls,
of which the first is left out: it finds the memory as the other has left it.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
CALLS_PER_TURN = 3
WARM_UP_TURNS = 5
# About three seconds of Gloo for the largest.
FEW_TURNS, MANY_TURNS, LARGE = 20, 300, 4 << 20


def seconds_of_calls(size: int, groups: dict[str, dist.ProcessGroup]) -> dict[str, list[float]]:
    """Return what single calls for `size` bytes took this rank, by the name of the group."""
    tensor = torch.zeros(size // 4)
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(WARM_UP_TURNS + (FEW_TURNS if size > LARGE else MANY_TURNS)):
        for name, group in groups.items():
            for call in range(CALLS_PER_TURN):
                begin = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                end = time.perf_counter()
                if turn >= WARM_UP_TURNS and call > 0:
                    seconds[name].append(end - begin)
    return seconds


def main() -> None:
    dist.init_process_group("bagua")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    assert dist.group.WORLD is not None
    results = []
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"{'bytes':>12}  {'bagua, us':>12}  {'gloo, us':>12}  {'gloo / bagua':>12}")
    for size in SIZES:
        medians = {
            name: statistics.median(seconds)
            for name, seconds in seconds_of_calls(size, {"bagua": dist.group.WORLD, "gloo": gloo}).items()
        }
        ours, theirs = (1e6 * medians[name] for name in ("bagua", "gloo"))
        results.append({"bytes": size, **medians})
        if is_first:
            print(f"{size:12,}  {ours:12,.1f}  {theirs:12,.1f}  {theirs / ours:12.1f}", flush=True)
    if is_first and len(sys.argv) > 1:
        report = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "seconds": results,
        }
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
