# SPDX-License-Identifier: Apache-2.0
"""How much of a line one channel of NCCL's gets over the plugin, without NCCL. Needs root and iproute2.

python benchmarks/hosts/nccl_net.py --rates 1G 10G --round-trips 0ms 10ms 50ms

tests/nccl_net/rank.py sends from one emulated host to another, with as many messages under way as NCCL has of a
channel. One plain TCP connection, and the plugin with and without a job secret, take turns.
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
from collections.abc import Sequence
from pathlib import Path

from bagua._native import _C
from bagua.bench.emulated_hosts import Host, Network, emulated_hosts, rate_of, time_of

_TESTS = Path(__file__).parents[2] / "tests"
sys.path.append(str(_TESTS / "support"))
import traffic  # noqa: E402

_PLUGIN = Path(_C.__file__).with_name("libnccl-net-bagua.so")
# How long a line of the rate is busy. 10 Gbit/s are more than the emulation carries.
_SECONDS = 4.0
_MOST_BYTES = 1 << 30


def over_the_plugin(hosts: Sequence[Host], size: int, secret: str | None) -> tuple[float, float]:
    """Return bytes per second: of all, and of the second half, when connections have found their rate."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, host in enumerate(hosts):
            command = [sys.executable, str(_TESTS / "nccl_net" / "rank.py"), str(rank), "2", str(_PLUGIN), folder]
            environment = {key: value for key, value in os.environ.items() if not key.startswith(("BAGUA_", "NCCL_"))}
            environment.update(host.environment(), **({"BAGUA_JOB_SECRET": secret} if secret else {}))
            command = host.command([*command, "stream", "--most", str(size)])
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        found = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
    assert all(one["result"] == 0 for one in found), found
    # The receiver's clock.
    return float(size / found[1]["seconds"]), float(size / 2 / found[1]["last_half"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=["1G", "10G"], help="bits per second of a host (1G 10G)")
    parser.add_argument("--round-trips", nargs="*", default=["0ms", "10ms", "50ms"], help="(0ms 10ms 50ms)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each (3)")
    args = parser.parse_args()
    print("| rate | round trip | one plain TCP connection | plain | its second half | encrypted | its second half |")
    print("|---|---|---|---|---|---|---|")
    for rate in args.rates:
        for round_trip in args.round_trips:
            bits = rate_of(rate)
            size = min(int(bits / 8 * _SECONDS), _MOST_BYTES) >> 20 << 20
            turns: list[tuple[float, ...]] = []
            with emulated_hosts(2, Network(bits, time_of(round_trip))) as hosts:
                for _ in range(args.turns):
                    plain_tcp = size / traffic.stream(hosts, size)["seconds"]
                    encrypted = secrets.token_hex(32)
                    turns.append(
                        (plain_tcp, *over_the_plugin(hosts, size, None), *over_the_plugin(hosts, size, encrypted))
                    )
            cells = [
                f"{8 * statistics.median(run) / bits:.2f} ({8 * min(run) / bits:.2f} to {8 * max(run) / bits:.2f})"
                for run in zip(*turns, strict=True)
            ]
            print(f"| {rate} | {round_trip} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
