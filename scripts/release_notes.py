#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the notes of a release, what CHANGELOG.md says of this version: release_notes.py [FOLDER]

With a folder, they name the wheels in it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "cmake"))
from package_metadata import BASE_VERSION  # noqa: E402  where it lies has just been said

# Of torch's own wheels.
OLDEST_GLIBC = (2, 28)
_WHEEL = re.compile(r"bagua-.+\+torch([\d.]+)-cp3(\d+)-.*manylinux_(\d+)_(\d+)_(\w+)\.whl")


def section(changes: str, version: str) -> str:
    """Return what is said of a version, which the list may call 0.1 instead of 0.1.0.

    Raises:
        ValueError: nothing is.
    """
    for part in re.split(r"^## ", changes, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        if title.split(",")[0].strip() in (version, version.removesuffix(".0")):
            return body.strip()
    raise ValueError(f"CHANGELOG.md says nothing of {version}: head its changes with '## {version}'")


def files(names: Sequence[str]) -> str:
    """Return a table of wheels by torch and Python, and what they need.

    Raises:
        ValueError: a wheel without a manylinux tag, which pip would take on any Linux or on none.
    """
    rows, needed = [], OLDEST_GLIBC
    for name in names:
        found = _WHEEL.fullmatch(name)
        if found is None:
            raise ValueError(f"{name} is not named bagua-VERSION+torchTORCH-cpPYTHON-...-manylinux_GLIBC_MACHINE.whl")
        torch, python, major, minor, machine = found.groups()
        needed = max(needed, (int(major), int(minor)))
        rows.append(f"| {torch} | 3.{python} | {machine} | `{name}` |")
    text = f"The wheels need glibc {needed[0]}.{needed[1]}"
    if needed > OLDEST_GLIBC:
        text += ", as they were built on a system of today: where it is older, build from the sdist"
    return "\n".join(["| torch | Python | machine | wheel |", "|---|---|---|---|", *rows, "", f"{text}."])


def main() -> int:
    text = f"# bagua {BASE_VERSION}\n\n{section((ROOT / 'CHANGELOG.md').read_text(), BASE_VERSION)}\n"
    if len(sys.argv) > 1:
        wheels = sorted(path.name for path in Path(sys.argv[1]).glob("*.whl"))
        text += f"\n## Files\n\n{files(wheels)}\n`SHA256SUMS` has the checksums, for `sha256sum --check`.\n"
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
