# SPDX-License-Identifier: Apache-2.0
"""Version and requirements of the package, which depend on the torch it is built for (scikit-build-core provider)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

BASE_VERSION = "0.1.0"


def _torch_minor() -> tuple[int, int]:
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        raise RuntimeError(
            "bagua is built against the torch that is installed: install torch 2.11 to 2.15 first, then "
            "`pip install scikit-build-core cmake ninja` and `pip install --no-build-isolation .`"
        ) from None
    return int(major), int(minor)


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    major, minor = _torch_minor()
    return {
        "version": f"{BASE_VERSION}+torch{major}.{minor}",
        "dependencies": [f"torch>={major}.{minor},<{major}.{minor + 1}"],
    }
