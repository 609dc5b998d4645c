# SPDX-License-Identifier: Apache-2.0
"""Takes the tensors out of a state, so that they travel as they are, and puts them back."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class _Place(int):
    """Where a tensor was taken out."""


def without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return a state with a place in the stead of each tensor; these are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_tensors(item, tensors) for item in value)
    return value


def with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return what `without_tensors` was given, with these tensors in the places."""
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(item, tensors) for item in value)
    return value
