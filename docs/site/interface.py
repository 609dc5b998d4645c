# SPDX-License-Identifier: Apache-2.0
"""Pages of the Python interface, from docstrings and from the registry of algorithms."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import bagua

# What a reader looks for first; the other exported names follow as the module lists them.
_FIRST = ["register_comm_hook", "Handle", "Stats", "comm_hook"]


def options_table(algorithm: str) -> str:
    """Return the section about the options of an algorithm."""
    info = bagua.describe(algorithm)
    lines = ["## Options", "", "| name | default | meaning |", "|---|---|---|"]
    lines += [f"| `{o['name']}` | `{o['default']!r}` | {o['summary']} |" for o in info["options"]]
    return "\n".join(lines)


def _members(module: str, listed: set[str], described: set[int]) -> list[str]:
    """Return directives for the names that a module exports, or defines, unless they are described elsewhere."""
    loaded = importlib.import_module(module)
    # Examples in docstrings are Python; elsewhere a block without a language is plain text.
    lines = [".. highlight:: python", "", f".. automodule:: {module}"]
    exported = getattr(loaded, "__all__", None)
    if exported is None:
        return [*lines, "   :members:", ""]
    lines.append("")
    for name in [*(name for name in _FIRST if name in exported), *(name for name in exported if name not in _FIRST)]:
        if name.startswith("_"):
            continue
        value = getattr(loaded, name)
        home = getattr(value, "__module__", module)
        if isinstance(value, ModuleType) or id(value) in described or (home != module and home in listed):
            continue
        described.add(id(value))
        kind = "autoclass" if isinstance(value, type) else "autofunction" if callable(value) else "autodata"
        lines += [f".. {kind}:: {module}.{name}", *(["   :members:"] if kind == "autoclass" else []), ""]
    return lines


def _page(title: str, modules: list[str], described: set[int]) -> str:
    lines = [f"# {title}", ""]
    for module in modules:
        if module != title:
            lines += [f"## {module}", ""]
        lines += ["```{eval-rst}", *_members(module, set(modules), described), "```", ""]
    return "\n".join(lines)


def _public_modules(package: str) -> list[str]:
    """Return a package and the modules in it whose names have no underscore in front."""
    loaded = importlib.import_module(package)
    found = [package]
    for module in pkgutil.walk_packages(loaded.__path__, f"{package}."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            found.append(module.name)
    return found


def interface_pages() -> dict[str, str]:
    """Return page -> text."""
    described: set[int] = set()
    modules = (
        "bagua",
        "bagua.compressed",
        "bagua.fsdp",
        "bagua.elastic",
        "bagua.lightning",
        "bagua.pytorch_lightning",
        "bagua.transformers",
    )
    pages = {name: _page(name, [name], described) for name in modules}
    # What the package re-exports is described where it is defined.
    originals = [module for module in _public_modules("bagua.torch_api") if module != "bagua.torch_api"]
    pages["bagua.torch_api"] = _page("bagua.torch_api", originals, described)
    listed = "\n".join(pages)
    said = f"Of version {bagua.__version__}, from its docstrings. Modules with a leading underscore may change."
    pages["index"] = f"# Python interface\n\n{said}\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    return pages
