# SPDX-License-Identifier: Apache-2.0
"""Codecs: how tensors are written into fewer bytes before they travel."""

from __future__ import annotations

from bagua._native import _C


def available_codecs() -> list[str]:
    """Return the names of the codecs that this build holds."""
    return list(_C.codec_names())
