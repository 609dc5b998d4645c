# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import argparse
import json
import sys

from bagua.info import nccl_net, ranks
from bagua.info.facts import advice, facts, table


def main() -> int:
    """Print facts and advice; the exit status is 1 where ranks do not reach each other."""
    parser = argparse.ArgumentParser(
        prog="python -m bagua.info",
        description="Prints versions, devices, what was built, what carries data, and what is missing with the remedy.",
        epilog="Under torchrun it prints which ranks share a host and tries whether they reach each other:\n"
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m bagua.info",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that ranks wait for each other (30)")
    parser.add_argument("--json", action="store_true", help="print facts and notes as JSON, for a report or a program")
    parser.add_argument(
        "--nccl-net", action="store_true", help="print only what NCCL_NET_PLUGIN is to be for NET/bagua"
    )
    args = parser.parse_args()
    if args.nccl_net:
        print(nccl_net.path())
        return 0
    if ranks.is_under_a_launcher():
        return ranks.report(args.timeout, is_json=args.json)
    own = facts()
    if args.json:
        print(json.dumps({"facts": own, "notes": [*advice(own)]}, indent=1))
        return 0
    print(table(own))
    for sentence in advice(own):
        print(f"note: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
