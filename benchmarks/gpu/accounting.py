# SPDX-License-Identifier: Apache-2.0
"""Bytes that the codec moves through the memory of a device, and the packed sizes they follow from.

A range has to be known before the first value can be coded, so a tensor that is coded is read twice. `moved` counts
both: that is what the kernels ask of the memory. `once` counts every byte of input and output a single time, as a codec
that kept the whole tensor in the chip would move them. A second read may come from the second-level cache, which makes
`moved` too kind to a tensor that fits into it; `once` is too strict for one that does not.
"""

from __future__ import annotations

from typing import NamedTuple

HEADER = 32
ALIGNMENT = 32


class Bytes(NamedTuple):
    """Read and written in one call."""

    moved: int
    once: int


def chunk_length(elements: int, chunks: int) -> int:
    """Return the elements of the longest chunk."""
    return -(-elements // chunks)


def packed_bytes(elements: int, chunks: int) -> int:
    """Return the bytes of `elements` in so many packed chunks: a header and a byte for each element, padded."""
    return chunks * (HEADER + -(-chunk_length(elements, chunks) // ALIGNMENT) * ALIGNMENT)


def compress(elements: int, item: int, chunks: int) -> Bytes:
    """Read for the range, read for the codes, write the codes."""
    tensor, packed = elements * item, packed_bytes(elements, chunks)
    return Bytes(2 * tensor + packed, tensor + packed)


def decompress(elements: int, item: int, chunks: int) -> Bytes:
    """Read the codes, write the tensor."""
    total = packed_bytes(elements, chunks) + elements * item
    return Bytes(total, total)


def reduce_and_compress(elements: int, item: int, copies: int) -> Bytes:
    """Count what a rank does with its part of `elements` that are shared out over `copies` ranks.

    Read all copies of the part, write their mean, read it, write its codes. The mean is no output, so `once` leaves it
    out.
    """
    part = chunk_length(elements, copies)
    received, packed = copies * packed_bytes(part, 1), packed_bytes(part, 1)
    return Bytes(received + 2 * part * item + packed, received + packed)
