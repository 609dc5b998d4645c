# SPDX-License-Identifier: Apache-2.0
"""Which of Lightning's two names the user works with: `lightning` and `pytorch_lightning` hold separate classes."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import Signature, signature
from types import ModuleType
from typing import Any

# The module with the Trainer, and ours with the classes made for it.
PACKAGES = {
    "lightning.pytorch": "bagua.lightning._for_lightning",
    "pytorch_lightning": "bagua.lightning._for_pytorch_lightning",
}
# The package that was taken without knowing, because neither had been imported.
_guess: str | None = None


def load() -> ModuleType:
    """Return our classes for the package that the user has imported, or else for one that is installed.

    The classes for the other one follow when that is imported.

    Raises:
        ImportError: neither is installed, or in a version before 2.0.
    """
    global _guess
    imported = [name for name in PACKAGES if _is_imported(name)]
    if not imported:
        imported = [name for name in PACKAGES if _is_installed(name.partition(".")[0])][:1]
        if not imported:
            raise ImportError(
                "bagua.lightning needs Lightning, which is not installed: type 'pip install lightning' (or "
                "'pip install pytorch-lightning')"
            )
        _guess = imported[0]
    for name in imported:
        version = str(import_module(name).__version__)
        if int(version.partition(".")[0]) < 2:
            raise ImportError(f"bagua.lightning needs Lightning 2.0 or later, but {name} is of version {version}")
    modules = [import_module(PACKAGES[name]) for name in imported]
    for name in PACKAGES.keys() - set(imported):
        sys.meta_path.insert(0, _Follower(name, lambda name=name: import_module(PACKAGES[name])))  # type: ignore[misc]
    return modules[0]


def _is_imported(module: str) -> bool:
    # None stands for one that must not be imported.
    return sys.modules.get(module) is not None


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    # Any folder of that name in the path would do, but has no origin.
    return spec is not None and spec.origin is not None


class _Follower(MetaPathFinder):
    """Calls a function once, after a module has been imported."""

    def __init__(self, module: str, function: Callable[[], object]) -> None:
        self._module = module
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as if we were not there, and have its loader call the function at the end."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._function()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


class OfTheUsersPackage(ABCMeta):
    """Of classes that exist for either package, and whose default may have been a wrong guess.

    `from bagua.lightning import BaguaStrategy` above `import pytorch_lightning`, with both installed, has taken
    `lightning`. When an instance is made, the user's package is known.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the class that goes with the user's package."""
        if _guess is not None and cls.__module__ == PACKAGES[_guess]:
            later = next((ours for name, ours in PACKAGES.items() if name != _guess and _is_imported(name)), None)
            if later is not None:
                return getattr(import_module(later), cls.__name__)(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def __signature__(cls) -> Signature:
        """The constructor's, which inspect would not look for behind __call__."""
        own = signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:])
