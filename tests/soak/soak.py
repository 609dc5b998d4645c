# SPDX-License-Identifier: Apache-2.0
"""The long form of the soak: python tests/soak/soak.py --operations 200000

Makes rounds of random calls until as many operations have been made, each round with new ranks, another number of them,
another layout of hosts and another seed. The first wrong result ends it with the seed that shows it again.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from soak_ranks import LAYOUTS, soak


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=int(os.environ.get("SOAK_OPERATIONS", "200000")))
    parser.add_argument("--round", type=int, default=5000, help="operations of one round")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; by default the time")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a round may take")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(range(2, 9)))
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    return parser.parse_args()


def main() -> None:
    """Run rounds until enough operations have been made."""
    arguments = _arguments()
    first_seed = int(time.time()) if arguments.seed is None else arguments.seed
    # Seven numbers of ranks and four layouts: every pair comes up.
    sizes, layouts = itertools.cycle(arguments.ranks), itertools.cycle(arguments.layouts)
    made = checked = 0
    begin = time.monotonic()
    for seed in itertools.count(first_seed):
        if made >= arguments.operations:
            break
        size, layout = next(sizes), next(layouts)
        operations = min(arguments.round, arguments.operations - made)
        text = f"--seed {seed} --ranks {size} --layouts '{layout}' --round {operations} --operations {operations}"
        print(
            f"soak: {made} of {arguments.operations} operations, {time.monotonic() - begin:.0f} s; {text}", flush=True
        )
        checked += soak(size, seed, operations, layout, arguments.timeout)
        made += operations
    seconds = time.monotonic() - begin
    print(f"soak: {made} operations, {checked} results on their ranks checked, none wrong, {seconds:.0f} s")


if __name__ == "__main__":
    main()
