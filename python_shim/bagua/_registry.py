# SPDX-License-Identifier: Apache-2.0
"""The algorithms and codecs that this build holds, as the C++ registries describe them."""

from __future__ import annotations

from typing import Any, TypedDict

from bagua._native import _C


class OptionInfo(TypedDict):
    """One option of an algorithm: its name, its default, and a sentence on what it does."""

    name: str
    default: bool | int | float | str | None
    summary: str


class AlgorithmInfo(TypedDict):
    """What `describe` returns of an algorithm.

    Attributes:
        name: the name for `register_comm_hook`.
        summary: a sentence.
        optimizer: the class of optimizer that it needs, "Optimizer" or "QAdamOptimizer"; "" where it needs none.
        runs_in_background: whether it communicates beside the training, until `handle.abort()`.
        steps_may_differ: whether ranks may take different numbers of steps.
        is_exact: whether all ranks hold the same weights after every step.
        options: its options, in their order.
    """

    name: str
    summary: str
    optimizer: str
    runs_in_background: bool
    steps_may_differ: bool
    is_exact: bool
    options: list[OptionInfo]


def available_algorithms() -> list[str]:
    """Return the names that `register_comm_hook` and `comm_hook` know."""
    return list(_C.algorithm_names())


def available_codecs() -> list[str]:
    """Return the names of the codecs that this build holds."""
    return list(_C.codec_names())


def describe(algorithm: str) -> AlgorithmInfo:
    """Return what an algorithm does, what it needs, and its options with their defaults.

    Raises:
        ValueError: no algorithm has this name; the message lists those there are.

    >>> [option["name"] for option in describe("gradient_allreduce")["options"]]
    ['hierarchical', 'average']
    """
    return _C.algorithm_info(algorithm)


def comparable(options: Any, algorithm: str) -> dict[str, Any]:
    """Return the options that two parts of a run share: all but the guard. What lacks had its default."""
    defaults = {option["name"]: option["default"] for option in describe(algorithm)["options"]}
    return {**defaults, **options, "guard": None}
