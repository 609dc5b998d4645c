# SPDX-License-Identifier: Apache-2.0
"""What every operation on a communicator begins and ends with: finding it, naming the call in errors, waiting."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from bagua.torch_api._checks import Checks
from bagua.torch_api._groups import resolve

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def collective(
    name: str,
) -> Callable[[Callable[Concatenate[Checks, _Arguments], _Result]], Callable[_Arguments, _Result]]:
    """Decorate a function that takes `Checks` before the arguments of the call, the last of which is `comm`.

    Callers see the other arguments. With the communicator of others the function is not called, and None returned.
    """

    def decorate(function: Callable[Concatenate[Checks, _Arguments], _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]
        position = [parameter.name for parameter in parameters].index("comm")

        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Any:
            given: Any = kwargs.get("comm", args[position] if len(args) > position else None)
            comm = resolve(given, name)
            if comm is None:
                return None
            checks = Checks(name, comm)
            with torch.no_grad():
                result = function(checks, *args, **kwargs)
            checks.wait()
            return result

        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate
