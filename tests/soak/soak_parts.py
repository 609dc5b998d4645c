# SPDX-License-Identifier: Apache-2.0
"""What every random call of the soak test consists of: values, memory with guards around it, a check."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from devices import here
from reference import reduced
from soak_plan import POOL_LENGTH, Call
from torch import Tensor


@functools.cache
def _pool() -> Tensor:
    """Small enough that no reduction over eight ranks rounds in any dtype."""
    generator = torch.Generator().manual_seed(7)
    return here(torch.randint(-3, 4, (POOL_LENGTH,), generator=generator, dtype=torch.int8, device="cpu"))


_GUARD_BYTES = 64
_GUARD_VALUE = 0xA5


@dataclass
class Side:
    """This rank's view of a group."""

    group: Any
    # Ranks of the world, in the order of their positions in the group.
    ranks: list[int]
    position: int
    # Of all results that rounding has a part in: equal on all members.
    checksum: int = 0

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass
class Started:
    """A call that this rank has made, and the check of its result, which may be made when all works are done."""

    call: Call
    check: Callable[[], None]
    works: list[Any] = field(default_factory=list)


class Buffer:
    """A tensor between two strips of memory that nobody may write."""

    def __init__(self, content: Tensor) -> None:
        item = content.element_size()
        self._bytes = torch.full((content.numel() * item + 2 * _GUARD_BYTES,), _GUARD_VALUE, dtype=torch.uint8)
        self.tensor = self._bytes[_GUARD_BYTES : _GUARD_BYTES + content.numel() * item].view(content.dtype)
        self.tensor.copy_(content)

    def expect_reduced(self, inputs: Tensor, call: Call) -> None:
        """Expect the reduction of the rows."""
        exact = inputs.to(torch.complex128 if call.dtype.is_complex else torch.float64)
        self.expect(reduced(list(inputs), call.op), call, "result", sizes=exact.abs().mean(0))

    def expect(self, expected: Tensor, call: Call, role: str, sizes: Tensor | None = None) -> None:
        if not torch.equal(self.tensor, expected) and not self._is_rounded(expected, call, sizes):
            wrong = (self.tensor != expected).nonzero().flatten()
            first = int(wrong[0])
            raise AssertionError(
                f"{call}: {role} is wrong in {wrong.numel()} of {expected.numel()} elements, the first at {first}: "
                f"expected {expected[first]}, got {self.tensor[first]}"
            )
        for strip in (self._bytes[:_GUARD_BYTES], self._bytes[-_GUARD_BYTES:]):
            if bool((strip != _GUARD_VALUE).any()):
                raise AssertionError(f"{call}: memory beside the {role} was written: {strip.tolist()}")

    def _is_rounded(self, expected: Tensor, call: Call, sizes: Tensor | None) -> bool:
        """Whether all that differs is the division of a mean, by the number of ranks or by its rounded inverse.

        Between hosts 16-bit parts are divided before they are added: their sizes count, which may cancel.
        """
        if call.op != "AVG" or not (call.dtype.is_floating_point or call.dtype.is_complex) or sizes is None:
            return False
        return bool(((self.tensor - expected).abs() <= 2 * torch.finfo(call.dtype).eps * sizes).all())


def inputs_of(call: Call, size: int, numel: int) -> Tensor:
    """What each rank puts in, a row per rank."""
    return _cast(_pool().as_strided((size, numel), (call.stride, 1), call.offset), call)


def _cast(raw: Tensor, call: Call) -> Tensor:
    dtype = call.dtype
    if dtype == torch.bool:
        return raw > 0
    if call.op == "PRODUCT":
        # Factors whose product stays small; bytes may wrap, which all do alike.
        odd = raw & 1
        return (1 + odd if dtype == torch.uint8 else 1 - 2 * odd).to(dtype)
    if dtype == torch.uint8:
        return raw.abs().to(dtype)
    if dtype.is_complex:
        return torch.complex(raw.double(), -raw.double() + 1).to(dtype)
    return raw.to(dtype)


def unset(numel: int, call: Call) -> Buffer:
    """For a result: no value of the pool."""
    return Buffer(torch.full((numel,), True if call.dtype == torch.bool else 99).to(call.dtype))


def started(call: Call, work: Any, check: Callable[[], None]) -> Started:
    return Started(call, check, [work] if call.is_async and work is not None else [])


def moved(call: Call, work: Any, *wanted: tuple[Buffer, Tensor, str]) -> Started:
    """As started(), with what each buffer is to hold, and its role."""

    def check() -> None:
        for buffer, expected, role in wanted:
            buffer.expect(expected, call, role)

    return started(call, work, check)
