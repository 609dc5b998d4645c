# SPDX-License-Identifier: Apache-2.0
"""Tensors in the containers of a state: taken out, so that they travel as they are, put back, brought to the CPU."""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor

from bagua._torch_private import tree_map_only


def to_cpu(tree: Any) -> Any:
    """Return the same containers with their tensors on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


class _Place(int):
    """Where a tensor was taken out."""


def without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return a state with a place in the stead of each tensor; these are added to `tensors`.

    Those inside an object that torch's `_pytree` does not know stay there, to be pickled.
    """

    def take(tensor: Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return tree_map_only(Tensor, take, value, is_leaf=lambda one: isinstance(one, Size))  # else a plain tuple


def with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return what `without_tensors` was given, with these tensors in the places."""
    return tree_map_only(_Place, tensors.__getitem__, value, is_leaf=lambda one: isinstance(one, Size))
