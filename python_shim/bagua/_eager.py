# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile out of functions that communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disabled(function: _Function) -> _Function:
    """Return the function as torch.compile calls it without looking into it.

    `torch.compiler.disable` imports torch._dynamo, which takes as long as torch's own import. DistributedDataParallel
    and optimizers import it when they are made, so the price is paid by then: call this where there is one of them, and
    not while a module of ours is imported.
    """
    return cast("_Function", torch.compiler.disable(function))  # type: ignore[no-untyped-call,unused-ignore]


class _Eager:
    """A method that replaces itself by the disabled function when somebody first asks for it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        function = disabled(self._function)
        setattr(self._owner, self._name, function)
        return function if instance is None else function.__get__(instance, owner)


def eager(method: _Function) -> _Function:
    """Decorate a method that torch.compile is to call as it is; see `disabled` for when."""
    return cast("_Function", _Eager(method))
