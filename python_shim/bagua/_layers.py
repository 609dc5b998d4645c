# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model make a layer, as far as their names tell."""

from __future__ import annotations

from collections.abc import Iterable


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
    layers: list[int] = []
    former = None
    for name in names:
        layer = layer_of(name)
        layers.append((layers[-1] if layers else -1) + (layer != former))
        former = layer
    return layers
