# SPDX-License-Identifier: Apache-2.0
"""The command line: reads the arguments, then starts ranks or becomes one."""

from __future__ import annotations

import sys

from bagua.bench.launch import run
from bagua.bench.options import parse

if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
