# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model make a layer, as far as their names tell."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def layer_of(name: str) -> str:
    """Return the layer of a parameter: "h.3" of "h.3.attention.weight", "head" of "head.weight", "scale" of "scale".

    Modules that are numbered (in a ModuleList or Sequential) are layers with all that is in them; of others, the module
    that owns the parameter is.
    """
    path = name.split(".")
    for place, component in enumerate(path):
        if component.isdigit():
            return ".".join(path[: place + 1])
    return ".".join(path[:-1]) or name


def layers_of(names: Iterable[str]) -> list[int]:
    """Return a number for each name, which neighbours of one layer share."""
    return [number for number, (_, layer) in enumerate(groupby(names, layer_of)) for _ in layer]
