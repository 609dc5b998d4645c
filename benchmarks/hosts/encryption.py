# SPDX-License-Identifier: Apache-2.0
"""What a job secret costs: collectives between emulated hosts with and without it, in turns. Needs root and iproute2.

python benchmarks/hosts/encryption.py --rate 1G --delay 10ms

A secret is of a whole process, so each turn is a run of `python -m bagua.bench` of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bagua.bench.report import size_text

AIM = 0.85  # of the rate without encryption
SIZES = ("-b", "4K", "-e", "16M", "-f", "64")

# Milliseconds of a call, by its test and size.
Times = dict[tuple[str, int], float]


def times(command: list[str], secret: str | None) -> Times:
    """Return the medians of one run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_JOB_SECRET")}
    if secret:
        environment["BAGUA_JOB_SECRET"] = secret
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        subprocess.run([*command, "--json", str(file)], env=environment, check=True, stdout=subprocess.DEVNULL)
        content = json.loads(file.read_text())
    assert content["environment"]["is_encrypted"] == bool(secret)
    return {(line["test"], line["size"]): 1e3 * line["seconds"]["median"] for line in content["results"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tests", nargs="*", default=["all_reduce", "send_recv"], help="of bagua.bench (all_reduce send_recv)"
    )
    parser.add_argument("--rate", default="1G", help="bits per second of a host (1G)")
    parser.add_argument("--delay", default="10ms", help="round trip between hosts (10ms)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each (3)")
    args = parser.parse_args()
    command = [sys.executable, "-m", "bagua.bench", *args.tests, *SIZES, "--hosts", "2"]
    command += ["--rate", args.rate, "--delay", args.delay]
    plain, encrypted = [], []
    for _ in range(args.turns):
        plain.append(times(command, None))
        encrypted.append(times(command, secrets.token_hex(32)))
    print(f"2 hosts, {args.rate} bit/s, {args.delay} of round trip, {args.turns} runs each, in turns")
    print(f"{'test':<16}{'size':>10}{'plain ms':>12}{'encrypted':>12}{'of the rate':>13}")
    shares = []
    for key in plain[0]:
        without, with_it = (statistics.median(run[key] for run in runs) for runs in (plain, encrypted))
        shares.append(without / with_it)
        print(f"{key[0]:<16}{size_text(key[1]):>10}{without:>12.2f}{with_it:>12.2f}{shares[-1]:>13.2f}")
    verdict = "met" if min(shares) >= AIM else "missed"
    print(
        f"Encrypted calls reach {min(shares):.2f} to {max(shares):.2f} of the plain rate ({AIM} aimed at: {verdict})."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
