# SPDX-License-Identifier: Apache-2.0
"""Which scheduler runs the buckets of which model."""

from __future__ import annotations

import weakref
from typing import Any

_schedulers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register_backend(model_name: str, scheduler: Any) -> None:
    """Let `get_backend` find the scheduler of a model, for as long as something else keeps it."""
    _schedulers[model_name] = scheduler


def get_backend(model_name: str) -> Any:
    """Return the scheduler that runs the buckets of a model; the same one as long as the model stays wrapped.

    Args:
        model_name: `bagua_module_name` of a module wrapped by `with_bagua`; no name of a communication backend.

    Raises:
        ValueError: no model of that name is wrapped. (The original made a scheduler that no model used.)
    """
    scheduler = _schedulers.get(model_name)
    if scheduler is None:
        raise ValueError(
            f"get_backend: no model is called {model_name!r}, those wrapped by with_bagua are {sorted(_schedulers)}"
        )
    return scheduler
