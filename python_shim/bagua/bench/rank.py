# SPDX-License-Identifier: Apache-2.0
"""A rank on an emulated host: rank.py SETTINGS RANK MEETING, started by launch.py."""

from __future__ import annotations

import sys

from bagua.bench.launch import be_rank

if __name__ == "__main__":
    sys.exit(be_rank(*sys.argv[1:]))
