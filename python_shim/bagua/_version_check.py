# SPDX-License-Identifier: Apache-2.0
"""One clear sentence instead of a missing symbol, when bagua meets another torch than it was built for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from bagua import _build_info


def _minor(torch_version: str) -> str:
    return ".".join(torch_version.split(".")[:2])


def package_version() -> str:
    """Return the version of the installed distribution, such as "0.1.0+torch2.15"."""
    try:
        return version("bagua")
    except PackageNotFoundError:
        return "0+unknown"


def check_torch() -> None:
    """Raise ImportError unless the installed torch is of the minor version that bagua's C++ parts were built for."""
    # Importing torch is no detour: the C++ parts need its libraries loaded first.
    import torch

    built, found = _minor(_build_info.TORCH_VERSION), _minor(torch.__version__)
    if found != built:
        raise ImportError(
            f"bagua {package_version()} was built for torch {built} but torch {torch.__version__} is installed: "
            f"build bagua again with `pip install --no-build-isolation --force-reinstall --no-deps .` in its source "
            f"folder (`make setup` there does it too), or install the torch it knows: `pip install 'torch=={built}.*'`."
        )
