# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ parts, after making sure that they fit the torch at hand, and registers the backend."""

from importlib.metadata import PackageNotFoundError, version

import bagua_autoload
import torch

from bagua import _build_info


def package_version() -> str:
    """Return the version of the installed distribution, such as "0.1.0+torch2.15"."""
    try:
        return version("bagua")
    except PackageNotFoundError:
        return "0+unknown"


_built, _found = (".".join(one.split(".")[:2]) for one in (_build_info.TORCH_VERSION, torch.__version__))
if _found != _built:
    raise ImportError(
        f"bagua {package_version()} was built for torch {_built} but torch {torch.__version__} is installed: "
        f"build bagua again with `pip install --no-build-isolation --force-reinstall --no-deps .` in its source "
        f"folder (`make setup` there does it too), or install the torch it knows: `pip install 'torch=={_built}.*'`."
    )

from bagua import _C  # noqa: E402  after the check, which explains what would be a missing symbol here

Options = _C.Options
# torch calls this where it finds entry points; a source tree that was not installed has none.
bagua_autoload.register()
