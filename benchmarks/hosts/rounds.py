# SPDX-License-Identifier: Apache-2.0
"""Times steps of diloco between emulated hosts against steps that communicate nothing. Needs root and iproute2.

python benchmarks/hosts/rounds.py --rate 100M --round-trip 50ms --sync-every 100 --fragments 4 --delay 5 --codec 4bit
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from bagua.bench.emulated_hosts import Network, rate_of, time_of
from run import run_on_hosts


def main() -> None:
    """Measure, and print means, worst steps and what was sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=rate_of, default=100e6, help="bits per second of a host, such as 100M")
    parser.add_argument("--round-trip", type=time_of, default=0.05, help="between hosts, such as 50ms")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--model", default="convolutional", choices=("convolutional", "transformer"))
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument("--codec", default=None)
    parser.add_argument("--turns", type=int, default=3, help="of sync_every steps each, with and without communication")
    parser.add_argument("--json", type=Path, help="where to write all times")
    args = parser.parse_args()
    options = {"sync_every": args.sync_every, "fragments": args.fragments, "delay": args.delay, "codec": args.codec}
    script = ["training_rounds.py", args.model, str(args.turns), str(args.sync_every), json.dumps(options)]
    network = Network(args.rate, args.round_trip)
    (result,) = run_on_hosts(args.hosts, 1, network, script, 1800)
    local = statistics.mean(result["local"])
    print(
        f"{args.model}, {result['parameters'] / 1e6:.1f} million parameters, {args.hosts} hosts, {network}, {options}"
    )
    print(f"{'':<20}{'mean ms':>10}{'median ms':>10}{'worst ms':>10}{'mean / local':>14}{'worst / local':>14}")
    for name in ("local", "rounds", "gloo"):
        times = result[name]
        mean, worst = statistics.mean(times), max(times)
        cells = f"{1e3 * mean:>10.1f}{1e3 * statistics.median(times):>10.1f}{1e3 * worst:>10.1f}"
        print(f"{name:<20}{cells}{mean / local:>14.3f}{worst / local:>14.2f}")
    print(f"a rank sent {result['sent'] / 1e6:.2f} MB in {args.turns} rounds; it holds {result['memory']}")
    print("seconds of the communication threads: " + ", ".join(f"{k} {v:.2f}" for k, v in result["seconds"].items()))
    if args.json:
        args.json.write_text(json.dumps({"options": options, "network": str(network), **result}))


if __name__ == "__main__":
    main()
