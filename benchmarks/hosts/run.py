# SPDX-License-Identifier: Apache-2.0
"""Times training steps between emulated hosts, at several speeds of the network, all ways in one run.

python benchmarks/hosts/run.py [--rates 100e6 1e9] [--hosts 2] [--ranks-per-host 1] [--model convolutional]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from emulated_hosts import NoEmulatedHosts, emulated_hosts

HERE = Path(__file__).parent
WAYS = [
    "no communication",
    "gloo",
    "gloo, fp16 hook",
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "low_precision_decentralized",
    "decentralized",
]


def run(rate: float | None, hosts: int, ranks_per_host: int, model: str, ways: list[str]) -> list[dict[str, Any]]:
    """Return what rank 0 measured."""
    with emulated_hosts(hosts, rate) as made:
        processes = []
        for index, host in enumerate(made):
            torchrun = ["-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={ranks_per_host}"]
            meeting = [f"--node-rank={index}", f"--master-addr={made[0].address}", "--master-port=29517"]
            command = [sys.executable, *torchrun, *meeting, str(HERE / "training_steps.py"), model, *ways]
            environment = {**host.environment(), "OMP_NUM_THREADS": "1"}
            output = subprocess.PIPE if index == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(host.command(command), env=environment, stdout=output, text=True))
        text, _ = processes[0].communicate(timeout=900)
        for process in processes:
            if process.wait(timeout=60) != 0:
                raise RuntimeError("a rank of the benchmark failed, see above")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def table(results: list[dict[str, Any]]) -> str:
    """Return milliseconds per step, beside those of Gloo."""
    median = {result["way"]: result["median"] for result in results}
    lines = [f"{'':<30}{'ms per step':>12}{'gloo / this':>13}"]
    for way, seconds in median.items():
        ratio = f"{median['gloo'] / seconds:.2f}" if "gloo" in median else "-"
        lines.append(f"{way:<30}{1e3 * seconds:>12.1f}{ratio:>13}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table for each network, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[100e6, 1e9, 10e9], help="bits per second; 0: no limit"
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--model", default="convolutional", choices=("convolutional", "transformer"))
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--json", type=Path, help="where to write all times")
    args = parser.parse_args()
    everything = []
    for rate in args.rates:
        try:
            results = run(rate or None, args.hosts, args.ranks_per_host, args.model, args.ways)
        except NoEmulatedHosts as error:
            sys.exit(f"no emulated hosts on this machine: {error}")
        what = f"{rate / 1e6:,.0f} Mbit/s" if rate else "unlimited"
        print(
            f"\n{args.model}, {args.hosts} hosts of {args.ranks_per_host} ranks, {what}\n{table(results)}", flush=True
        )
        settings = {"rate": rate, "hosts": args.hosts, "ranks_per_host": args.ranks_per_host, "model": args.model}
        everything.append({**settings, "results": results})
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
