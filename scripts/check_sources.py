#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks of the source tree that no other tool makes: the licence of each file, and sizes.

A file that has grown past its limit is two ideas: split it. A layer that has grown past its limit has something in it
that no promise needs. Raise a limit only with a reason in the commit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".sh"}
LICENSED = SOURCES | {".cmake", ".yml", ".yaml"}
MOST_LINES_OF_A_FILE = 400
SPDX = "SPDX-License-Identifier: Apache-2.0"


class Layer(NamedTuple):
    """A folder, the suffixes that count, and the most lines: those of today, which only go down, towards the goal."""

    suffixes: set[str]
    most: int
    goal: int
    counts_tests: bool = False


LAYERS = {
    "backend": Layer({".h", ".cpp"}, 23_162, 16_000),
    "python_shim": Layer({".py"}, 13_991, 8_500),
    "tests": Layer({".py"}, 30_136, 22_000, counts_tests=True),
}


def _tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [Path(name) for name in names.stdout.splitlines() if (ROOT / name).is_file()]


def _lines(path: Path) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


def unlicensed(paths: list[Path]) -> list[str]:
    """Name the files whose first two lines do not hold the licence; an empty file needs none."""
    found = []
    for path in paths:
        if path.suffix in LICENSED or path.name == "CMakeLists.txt":
            lines = _lines(path)
            if lines and not any(line.endswith(SPDX) for line in lines[:2]):
                found.append(f"{path}: no '{SPDX}' in its first two lines")
    return found


def too_long(paths: list[Path]) -> list[str]:
    """Name the files of more lines than one idea takes."""
    written = {path: _lines(path) for path in paths if path.suffix in SOURCES}
    # One that a script writes is not read as one idea.
    lengths = {
        path: len(lines) for path, lines in written.items() if not any("# Written by" in one for one in lines[:2])
    }
    return [
        f"{path}: {length} lines, at most {MOST_LINES_OF_A_FILE}"
        for path, length in lengths.items()
        if length > MOST_LINES_OF_A_FILE
    ]


def too_large(paths: list[Path]) -> list[str]:
    """Name the layers of more lines than their limit."""
    found = []
    for name, layer in LAYERS.items():
        size = sum(
            len(_lines(path))
            for path in paths
            if path.parts[0] == name
            and path.suffix in layer.suffixes
            and (layer.counts_tests or not path.stem.endswith(("_test", "_mock")))
        )
        print(f"{name}: {size} lines, at most {layer.most}, the goal is {layer.goal}")
        if size > layer.most:
            found.append(f"{name}: {size} lines in {', '.join(sorted(layer.suffixes))}, at most {layer.most}")
    return found


def main() -> int:
    paths = _tracked()
    wrong = unlicensed(paths) + too_long(paths) + too_large(paths)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
