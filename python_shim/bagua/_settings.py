# SPDX-License-Identifier: Apache-2.0
"""What is set in the environment for bagua, and what only looks so."""

from __future__ import annotations

import logging
import os

from bagua._native import _C

_logger = logging.getLogger("bagua")
_KNOWN = _C.setting_names()
# What builds and tests of bagua read begins so; a developer may have set it.
_OF_DEVELOPERS = tuple(
    "BAGUA_" + name for name in ("CUDA_", "FAULT_", "STEPS", "TEST_", "TRACES", "UNITY_", "WARNINGS_")
)
_named: set[str] = set()


def warn_of_unknown(rank: int) -> None:
    """Warn, once in a process, of variables that nobody reads: a misspelt setting would have no effect, in silence."""
    for name in sorted(os.environ.keys() - {*_KNOWN, *_named}):
        if name.startswith("BAGUA_") and not name.startswith(_OF_DEVELOPERS):
            _named.add(name)
            meant = _C.suggestion_for(name, _KNOWN)
            _logger.warning("bagua: rank %d: no setting is called %s, it has no effect%s", rank, name, meant)
