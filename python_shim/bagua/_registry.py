# SPDX-License-Identifier: Apache-2.0
"""The algorithms and codecs that this build holds, as the C++ registries describe them."""

from __future__ import annotations

import functools
from typing import Any, TypedDict

from bagua._native import _C

# What a type is tried with.
_KINDS = {
    "bool": True,
    "int": 1,
    "float": 0.5,
    "str": "word",
    "Sequence[str]": ("word",),
    "Mapping[str, str]": {"*": "int8"},
    "None": None,
}


class OptionInfo(TypedDict):
    """One option of an algorithm: its name, its type, its default, and a sentence on what it does."""

    name: str
    type: str
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
    """Return what an algorithm does, what it needs, and its options with their types and defaults.

    Raises:
        ValueError: no algorithm has this name; the message lists those there are.

    >>> [option["name"] for option in describe("gradient_allreduce")["options"]]
    ['hierarchical', 'average']
    """
    info = _C.algorithm_info(algorithm)
    for option in info["options"]:
        option["type"] = _type_of(algorithm, option["name"])
    return info


@functools.cache
def _type_of(algorithm: str, option: str) -> str:
    """Return the types that an option takes, as Python writes them, of which the C++ registry is asked."""
    taken = [kind for kind, value in _KINDS.items() if _takes(algorithm, option, value)]
    return " | ".join(kind for kind in taken if kind != "int" or "float" not in taken)


def _takes(algorithm: str, option: str, value: Any) -> bool:
    try:
        _C.check_options(algorithm, {option: value})
    except TypeError:
        return False
    except ValueError:
        # Of the right type, but another word; a list of words makes one word where lists are not meant.
        return not isinstance(value, tuple)
    return True


def comparable(options: Any, algorithm: str) -> dict[str, Any]:
    """Return the options that two parts of a run share: all but the guard. What lacks had its default."""
    defaults = {option["name"]: option["default"] for option in describe(algorithm)["options"]}
    return {**defaults, **options, "guard": None}
