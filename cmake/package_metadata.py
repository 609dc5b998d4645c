# SPDX-License-Identifier: Apache-2.0
"""Version and requirements of the package, which depend on the torch it is built for (scikit-build-core provider)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

BASE_VERSION = "0.1.0"
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
COMPILERS = ("c++", "g++", "clang++")


def _refuse(sentence: str) -> NoReturn:
    """End the build with a sentence, and without the frames of pip and of the build backend above it."""
    raise SystemExit(f"bagua cannot be built here: {sentence}")


def _check_machine() -> None:
    if sys.platform != "linux":
        name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        _refuse(f"it runs on Linux only, this is {name} (on Windows, WSL 2 is a Linux)")
    compiler = os.environ.get("CXX", "").split()[:1] or COMPILERS
    if not any(map(shutil.which, compiler)):
        _refuse(f"there is no C++ compiler ({', '.join(compiler)}): install g++ 11 or later, such as `apt install g++`")


def _torch_minor() -> tuple[int, int]:
    try:
        found = version("torch")
    except PackageNotFoundError:
        _refuse(
            "it is built against the torch that is installed, and there is none: type `pip install torch "
            "scikit-build-core cmake ninja`, then `pip install --no-build-isolation` and what you typed before"
        )
    major, minor = map(int, found.split(".")[:2])
    if not OLDEST_TORCH <= (major, minor) <= NEWEST_TORCH:
        _refuse(f"it supports torch 2.{OLDEST_TORCH[1]} to 2.{NEWEST_TORCH[1]}, installed is torch {found}")
    return major, minor


# What scikit-build-core is making: it says so before it asks for the rest.
_made = {"now": ""}


def build_state(build_state: str) -> None:
    _made["now"] = build_state


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    return {"dependencies": True}


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    _check_machine()
    major, minor = _torch_minor()
    if _made["now"] == "sdist":
        # Sources are of no torch yet.
        newest = f"{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}"
        return {"version": BASE_VERSION, "dependencies": [f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]},<{newest}"]}
    return {
        "version": f"{BASE_VERSION}+torch{major}.{minor}",
        "dependencies": [f"torch>={major}.{minor},<{major}.{minor + 1}"],
    }
