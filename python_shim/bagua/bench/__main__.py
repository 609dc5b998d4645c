# SPDX-License-Identifier: Apache-2.0
"""The command line: reads the arguments, then starts ranks or becomes one."""

import sys

from bagua.bench import plan
from bagua.bench.launch import run
from bagua.bench.options import parse

if __name__ == "__main__":
    sys.exit(plan.main(sys.argv[2:]) if sys.argv[1:2] == ["plan"] else run(parse(sys.argv[1:])))
