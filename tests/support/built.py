# SPDX-License-Identifier: Apache-2.0
"""Where C++ programs and libraries for tests are: in bin/ of what `make gpu-light` packs, else in the build tree."""

from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def built(name: str) -> Path:
    build = ROOT / "build" / f"torch{'.'.join(torch.__version__.split('.')[:2])}"
    for place in (ROOT / "bin", build / "tests" / "contract", build / "benchmarks" / "gpu"):
        if (place / name).exists():
            return place / name
    raise FileNotFoundError(f"{name} is not built: make build (which needs GoogleTest for tests)")
