# SPDX-License-Identifier: Apache-2.0
"""Refuses arguments in wrong places and of wrong types, with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from bagua._attachment import class_of_optimizer
from bagua._native import _C
from bagua._registry import AlgorithmInfo, available_algorithms, describe

_MOST_CHARACTERS = 80
_MOST_STEPS = (1 << 63) - 1


def shown(value: Any) -> str:
    """Return type and value in few characters."""
    text = " ".join(repr(value).split())
    return (
        f"{type(value).__qualname__} {text if len(text) < _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + '...'}"
    )


def check_algorithm(algorithm: Any, advice: str = "") -> None:
    """Refuse what is no name; `advice` says what else may be wrong."""
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm must be a name, one of {', '.join(available_algorithms())}, got {shown(algorithm)}{advice}"
        )


def by_name(call: str, algorithm: str, given: Any) -> str:
    """Return how options are given, with those that `given`, in the place of something else, may have been meant for.

    `call` is what is called, up to the algorithm, such as "comm_hook(".
    """
    info = describe(algorithm)
    options = _options_meant(info, given) or {option["name"]: option["default"] for option in info["options"][:1]}
    values = "".join(f", {name}={value!r}" for name, value in options.items())
    optimizer = ", optimizer=optimizer" if info["optimizer"] and call.startswith("register_comm_hook") else ""
    return f"Options are given by name: write {call}{algorithm!r}{optimizer}{values})"


def _options_meant(info: AlgorithmInfo, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    if not isinstance(given, (bool, int, float, str)):
        return {}
    for option in info["options"]:
        name = option["name"]
        takes_any_word = isinstance(given, str) and _takes(info["name"], name, "no such word")
        if _takes(info["name"], name, given) and not takes_any_word:
            return {name: given}
    return {}


def _takes(algorithm: str, option: str, value: Any) -> bool:
    try:
        _C.check_options(algorithm, {option: value})
    except (TypeError, ValueError):
        return False
    return True


def check_optimizer_type(algorithm: str, optimizer: Any, *, is_by_name: bool = False) -> None:
    """Refuse what is no optimizer, such as an optimizer's name, or, unless it was given by name, an option."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return
    info = describe(algorithm)
    expected = f"optimizer must be a {class_of_optimizer(info['optimizer'])}, got {shown(optimizer)}"
    if is_by_name or (info["optimizer"] and not _options_meant(info, optimizer)):
        raise TypeError(f"{expected}: pass the optimizer itself: optimizer=optimizer")
    raise TypeError(f"{expected}. {by_name('register_comm_hook(model, ', algorithm, optimizer)}")


def check_group_type(algorithm: str, process_group: Any, call: str) -> None:
    """Refuse what is no group of this rank; `call` as for `by_name`."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup of this rank, got {shown(process_group)}. "
            f"{by_name(call, algorithm, process_group)}"
        )


def check_checkpoint(state_dict: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of a handle whose parts are not of the types that `Handle.state_dict` gives them."""
    state, layout, step = state_dict["state"], state_dict["layout"], state_dict.get("step", 0)
    guard = state_dict.get("guard")
    is_state = isinstance(state, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    )
    is_layout = isinstance(layout, (list, tuple)) and all(
        isinstance(bucket, (list, tuple)) and all(map(_is_number, bucket)) for bucket in layout
    )
    for name, value, is_valid, expected in (
        ("state", state, is_state, "a dict of names and tensors"),
        ("layout", layout, is_layout, "a list of lists of parameters' numbers"),
        ("step", step, _is_number(step), "a number of steps"),
        ("guard", guard, guard is None or isinstance(guard, Tensor), "a tensor or None"),
    ):
        if not is_valid:
            raise TypeError(
                f"{name!r} of the checkpoint must be {expected}, got {shown(value)}: pass what the state_dict() of "
                "this rank's handle has returned"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST_STEPS
