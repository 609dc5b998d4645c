# SPDX-License-Identifier: Apache-2.0
"""Bytes that a codec moves through the memory of a device.

minmax_uint8 has to know a range before the first value can be coded, so a tensor that it codes is read twice. `moved`
counts both: that is what the kernels ask of the memory. `once` counts every byte of input and output a single time, as
a codec that kept the whole tensor in the chip would move them. A second read may come from the second-level cache: then
`moved` is too kind to a tensor that fits into it. `once` is too strict for one that does not.
"""

from __future__ import annotations

from typing import NamedTuple

FLOAT32 = 4


class Bytes(NamedTuple):
    """Read and written in one call."""

    moved: int
    once: int


def chunk_length(elements: int, chunks: int) -> int:
    """Return the elements of the longest chunk."""
    return -(-elements // chunks)


def _reads(codec: str) -> int:
    return 2 if codec == "minmax_uint8" else 1


def encode(codec: str, elements: int, item: int, packed: int, *, feedback: bool) -> Bytes:
    """Read the values, for minmax_uint8 twice, write the codes; with feedback read and write float32 residuals too."""
    residual = FLOAT32 * elements if feedback else 0
    values = elements * item + residual
    return Bytes(_reads(codec) * values + residual + packed, values + residual + packed)


def decode(elements: int, item: int, packed: int) -> Bytes:
    """Read the codes, write the values."""
    return Bytes(packed + elements * item, packed + elements * item)


def mean(codec: str, part: int, item: int, packed: int, copies: int) -> Bytes:
    """Count what a rank does with `part` elements of which it has as many packed copies as there are ranks.

    Read all copies, write their mean and its codes; minmax_uint8 reads the mean again. The mean is no output, so `once`
    leaves it out.
    """
    return Bytes((copies + 1) * packed + _reads(codec) * part * item, (copies + 1) * packed)
