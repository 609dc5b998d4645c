# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile out of functions that communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Decorate a function that torch.compile is to call as it is."""
    return cast("_Function", torch.compiler.disable(function))  # type: ignore[no-untyped-call,unused-ignore]
