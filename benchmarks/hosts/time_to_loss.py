# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model between two emulated hosts, far apart, in all ways, one after another.

python benchmarks/hosts/time_to_loss.py   100 Mbit/s, 50 ms of round trip (40 minutes a seed). Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from pathlib import Path

from bagua.bench.emulated_hosts import Network, rate_of, time_of
from run import RESULTS, run_on_hosts
from training_loss import CONTENDERS, DICTIONARY

TEXT = RESULTS.parents[1] / "build/convergence"


def main() -> None:
    """Train, print what each reached when, write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=rate_of, default=100e6, help="bits per second of a host, such as 100M")
    parser.add_argument("--round-trip", type=time_of, default=0.05, help="between hosts, such as 50ms")
    parser.add_argument("--steps", type=int, default=DICTIONARY.length)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="CONTENDER")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the weights and of the batches")
    parser.add_argument("--dictionary", type=Path, default=TEXT, help="as of `make convergence`")
    parser.add_argument("--json", type=Path, default=RESULTS / "time_to_loss.json", help="others that it has stay")
    args = parser.parse_args()
    DICTIONARY.load(args.dictionary)  # Downloads it, where there is a network.
    network = Network(args.rate, args.round_trip)
    for seed, name in itertools.product(args.seeds, args.only):
        script = ["training_loss.py", name, str(args.steps), str(args.dictionary.resolve()), str(seed)]
        try:
            (result,) = run_on_hosts(2, 1, network, script, limit=900)
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # torch's hook does not always survive
            print(f"{name:<40} {error}", flush=True)
            continue
        print(f"{name:<40} {result['validation_loss']:.4f} after {result['seconds']:6.1f} s, seed {seed}", flush=True)
        others = json.loads(args.json.read_text())["results"] if args.json.exists() else []
        kept = [other for other in others if (other["contender"], other["seed"]) != (name, seed)]
        text = json.dumps({"network": str(network), "results": [*kept, result]}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
