# SPDX-License-Identifier: Apache-2.0
"""What collectives have to return, computed plainly on one rank, and the values that make the answer exact."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from devices import DEVICE, here
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)

# Pairs with a meaning. AVG of bool has none; complex numbers have no order; bits are those of integers.
_MEANINGFUL = [
    *[(op, dtype) for op in ("SUM", "PRODUCT") for dtype in DTYPES],
    *[("AVG", dtype) for dtype in (*FLOATS, *COMPLEX, *INTEGERS)],
    *[(op, dtype) for op in ("MIN", "MAX") for dtype in (*FLOATS, *INTEGERS, torch.bool)],
    *[(op, dtype) for op in ("BAND", "BOR", "BXOR") for dtype in (*INTEGERS, torch.bool)],
]
MEANINGLESS = [
    *[(op, dtype) for op in ("MIN", "MAX") for dtype in COMPLEX],
    *[(op, dtype) for op in ("BAND", "BOR", "BXOR") for dtype in (*FLOATS, *COMPLEX)],
]


def _nccl_has(op: str, dtype: torch.dtype) -> bool:
    return not (op.startswith("B") or dtype == torch.int16 or (op == "PRODUCT" and dtype.is_complex))


# What the transport of the device under test has.
MEANINGFUL = [case for case in _MEANINGFUL if DEVICE == "cpu" or _nccl_has(*case)]
REFUSED = [*MEANINGLESS, *[case for case in _MEANINGFUL if case not in MEANINGFUL]]


def dtypes_of(op: str) -> list[torch.dtype]:
    """Those with which an operation has a meaning."""
    return [dtype for name, dtype in MEANINGFUL if name == op]


OPERATIONS = list(dict(MEANINGFUL))


@contextmanager
def named(*case: object) -> Iterator[None]:
    """Say in which case of a loop something was wrong."""
    try:
        yield
    except BaseException as error:  # what pytest.raises() misses is no Exception
        raise AssertionError(f"{case}: {error}") from error


def for_each(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Do with each case what is written of one; what comes after the case is the same for all."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(body).parameters.values()

        def each(*given: Any) -> None:
            for case in cases:
                with named(case):
                    body(case, *given)

        vars(each).update(__signature__=inspect.Signature(others))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(each, name, getattr(body, name))
        return each

    return decorate


def reduce_op(name: str) -> dist.ReduceOp.RedOpType:
    op: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, name)
    return op


def values(dtype: torch.dtype, shape: Sequence[int], rank: int, op: str = "SUM") -> Tensor:
    """Of this rank, and small enough that no reduction over four ranks rounds or overflows in any dtype."""
    with torch.device("cpu"):
        drawn = _drawn(dtype, shape, rank, op)
    return here(drawn)


def _drawn(dtype: torch.dtype, shape: Sequence[int], rank: int, op: str) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 7 * len(shape) + sum(shape))
    # Four factors of at most 2 stay within int8; so do four summands of at most 9.
    low, high = (1, 3) if op == "PRODUCT" else (0, 10)
    real = torch.randint(low, high, shape, generator=generator)
    sign = 1 - 2 * torch.randint(0, 2, shape, generator=generator)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype == torch.uint8:
        return real.to(dtype)
    if dtype.is_complex:
        return torch.complex((sign * real).double(), real.flip(0).double()).to(dtype)
    return (sign * real).to(dtype)


def reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Reduction of the ranks' tensors in a wider type, converted back once."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([tensor.to(wide) for tensor in tensors])
    if op == "SUM":
        return stacked.sum(0).to(dtype)
    if op == "PRODUCT":
        return stacked.prod(0).to(dtype)
    if op == "AVG" and wide == torch.int64:
        return torch.div(stacked.sum(0), len(tensors), rounding_mode="trunc").to(dtype)
    if op == "AVG":
        return (stacked.sum(0) / len(tensors)).to(dtype)
    if op in ("MIN", "MAX"):
        return (stacked.amin(0) if op == "MIN" else stacked.amax(0)).to(dtype)
    result = stacked[0]
    for other in stacked[1:]:
        result = {"BAND": result & other, "BOR": result | other, "BXOR": result ^ other}[op]
    return result.to(dtype)


def assert_reduced(actual: Tensor, tensors: Sequence[Tensor], op: str) -> None:
    """Exact but for AVG: an exact sum that is divided, or multiplied by a rounded 1/n, errs by at most 1.5 ulp.

    NCCL multiplies every summand by 1/n instead: each product errs by 1.5 ulp of its own, and so do their few sums.
    """
    dtype = actual.dtype
    inexact = op == "AVG" and (dtype.is_floating_point or dtype.is_complex)
    tolerance = 2 * torch.finfo(dtype).eps if inexact else 0.0
    largest = max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0) if inexact else 0.0
    absolute = len(tensors) * tolerance * largest if actual.is_cuda else 0.0
    torch.testing.assert_close(actual, reduced(tensors, op), rtol=tolerance, atol=absolute)
