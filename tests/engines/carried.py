# SPDX-License-Identifier: Apache-2.0
"""Runs a script, and writes down what backend "bagua" carried for it: carried.py FOLDER SCRIPT ARGUMENTS...

One file a process: the operations of its groups that had more than one rank, and the bytes that went into them.
"""

import atexit
import json
import os
import pickle
import runpy
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch


def _bytes_of(entry: dict[str, Any]) -> int:
    return sum(
        torch.Size(size).numel() * getattr(torch, dtype.lower(), torch.uint8).itemsize
        for size, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    )


def _write(folder: str) -> None:
    from bagua import _C

    carried: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for entry in pickle.loads(_C.flight_recorder_trace())["entries"]:
        if entry["state"] == "completed":
            count = carried[entry["profiling_name"].removeprefix("c10d:")]
            count[0] += 1
            count[1] += _bytes_of(entry)
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(carried))


if __name__ == "__main__":
    atexit.register(_write, sys.argv[1])
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
