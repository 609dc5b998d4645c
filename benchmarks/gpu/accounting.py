# SPDX-License-Identifier: Apache-2.0
"""Bytes that the kernels of a codec ask of the memory of a device.

minmax_uint8 has to know a range before the first value can be coded, so a tensor that it codes is read twice. A second
read may come from the second-level cache: then this is too kind to a tensor that fits into it.
"""

from __future__ import annotations

FLOAT32 = 4


def chunk_length(elements: int, chunks: int) -> int:
    """Return the elements of the longest chunk."""
    return -(-elements // chunks)


def _reads(codec: str) -> int:
    return 2 if codec == "minmax_uint8" else 1


def encode(codec: str, elements: int, item: int, packed: int, *, feedback: bool) -> int:
    """Read the values, for minmax_uint8 twice, write the codes; with feedback read and write float32 residuals too."""
    residual = FLOAT32 * elements if feedback else 0
    return _reads(codec) * (elements * item + residual) + residual + packed


def decode(elements: int, item: int, packed: int) -> int:
    """Read the codes, write the values."""
    return packed + elements * item


def mean(codec: str, part: int, item: int, packed: int, copies: int) -> int:
    """Count what a rank does with `part` elements of which it has as many packed copies as there are ranks.

    Read all copies, write their mean and its codes; minmax_uint8 reads the mean again.
    """
    return (copies + 1) * packed + _reads(codec) * part * item
