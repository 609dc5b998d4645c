# SPDX-License-Identifier: Apache-2.0
"""Says which packages of pyproject.toml's dependency groups this interpreter lacks; fails if the build needs one.

Run by scripts/setup.sh where packages cannot be installed. Tests that need one that is missing are skipped or fail.
"""

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

# Not by tomllib, which Python 3.10 lacks.
_GROUPS = re.compile(r"^\[dependency-groups\]\n(.*?)^\[", re.MULTILINE | re.DOTALL)
_GROUP = re.compile(r'^(\w+) = \[("[^\]]*)\]$', re.MULTILINE)
# In place of the package of that name.
_PROGRAMS = ("cmake", "ninja")


def _is_there(name: str) -> bool:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return name in _PROGRAMS and shutil.which(name) is not None
    # See pyproject.toml's build-system.
    return name != "scikit-build-core" or not version.startswith("0.")


def main() -> int:
    (groups,) = _GROUPS.findall(Path("pyproject.toml").read_text())
    lacking = {
        group: [name for name in re.findall(r'"([^"]+)"', names) if not _is_there(name)]
        for group, names in _GROUP.findall(groups)
    }
    for group, names in lacking.items():
        if names:
            print(f"setup: missing for {group}: {', '.join(names)}")
    return 1 if lacking["build"] else 0


if __name__ == "__main__":
    sys.exit(main())
