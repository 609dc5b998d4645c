# SPDX-License-Identifier: Apache-2.0
"""Trains on Fashion-MNIST between two emulated hosts at 100 Mbit/s, in several ways, one after another."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bagua.bench.emulated_hosts import Network, NoEmulatedHosts
from run import RESULTS, run_on_hosts

WAYS = ["gloo", "gloo, fp16 hook", "bytegrad", "qadam"]
NETWORK = Network(bits_per_second=100e6)


def main() -> None:
    """Train, print when each way reached what, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--json", type=Path, default=RESULTS / "accuracy.json")
    args = parser.parse_args()
    results = []
    for way in args.ways:
        try:
            lines = run_on_hosts(2, 1, NETWORK, ["training_accuracy.py", way, str(args.epochs)], limit=1200)
        except NoEmulatedHosts as error:
            sys.exit(f"no emulated hosts on this machine: {error}")
        results += lines
        last = lines[-1]
        print(f"{way:<30} test accuracy {last['accuracies'][-1]:.4f} after {last['seconds'][-1]:.0f} s", flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
