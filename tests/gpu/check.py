# SPDX-License-Identifier: Apache-2.0
"""What tests of CUDA consist of: functions that every rank of a world calls, and that raise where something is wrong.

    @check({"float32": (torch.float32,), "int8": (torch.int8,)}, seconds=10)
    def sums(dtype: torch.dtype) -> None: ...

registers the checks sums.float32 and sums.int8. test_checks.py makes a test of each for every number of ranks, and
light.py runs most of them with two ranks in minutes. What a check returns are words for its line of the results.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Check(NamedTuple):
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    sizes: tuple[int, ...]
    seconds: float  # at most, of ranks that share a GPU
    cuda_only: bool
    # The hosts of its ranks, a letter each; "" for one host.
    hosts: str
    # Of the group of ranks that end with the check; 0 where any ranks will do.
    group_timeout: float
    # The ranks that kill themselves.
    dying: tuple[int, ...]


CHECKS: dict[str, Check] = {}


def check(
    cases: Mapping[str, tuple[Any, ...]] | None = None,
    *,
    sizes: tuple[int, ...] = (2, 3, 4),
    seconds: float = 15.0,
    cuda_only: bool = False,
    hosts: str = "",
    group_timeout: float = 0.0,
    dying: tuple[int, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for case, arguments in (cases or {"": ()}).items():
            name = ".".join(filter(None, [function.__name__, case]))
            assert name not in CHECKS, name
            CHECKS[name] = Check(name, function, arguments, sizes, seconds, cuda_only, hosts, group_timeout, dying)
        return function

    return register


class Wrong(str):
    """Returned, not raised, by a check that has made all of its calls: its ranks are of use to the next one."""


class Differences:
    """Collects what differs, to say it when all has been looked at."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._count = 0

    def same(self, label: str, actual: Tensor, expected: Tensor) -> None:
        """To the bit, but for NaN, which only has to be one."""
        self._count += 1
        actual, expected = actual.detach().cpu(), expected.detach().cpu()
        differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
        if actual.dtype != expected.dtype or bool(differs.any()):
            at = int(differs.flatten().nonzero()[0]) if differs.any() else 0
            values = f"{actual.flatten()[at].item()} not {expected.flatten()[at].item()}"
            self._found.append(f"{label}: {int(differs.sum())} of {differs.numel()} differ, at {at} {values}")

    def near(self, label: str, actual: Tensor, expected: Tensor, most: float, beside: Tensor | None = None) -> None:
        """The norm of the difference, of that of `beside` or of what is expected."""
        self._count += 1
        actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
        error = float((actual - expected).norm() / (expected if beside is None else beside).norm().clamp(min=1e-30))
        if not error <= most:
            self._found.append(f"{label}: off by {error:.2g} of the norm, allowed are {most:.2g}")

    def true(self, label: str, holds: bool) -> None:
        self._count += 1
        if not holds:
            self._found.append(label)

    def verdict(self, words: str = "") -> str:
        if self._found:
            return Wrong(f"{len(self._found)} of {self._count} wrong: " + "; ".join(self._found[:4]))
        return words or f"{self._count} results"


def fingerprint(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_told = itertools.count()


def told_by_all(value: str) -> list[str]:
    """What every rank says here, through the store, which does not depend on what is tested. All ranks wait."""
    store, key = dist.distributed_c10d._get_default_store(), f"told/{next(_told)}"
    store.set(f"{key}/{dist.get_rank()}", value)
    return [store.get(f"{key}/{rank}").decode() for rank in range(dist.get_world_size())]


def assert_same_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    assert len(set(told_by_all(fingerprint(tensors)))) == 1, "not all ranks have the same bits"


def ready() -> None:
    """Its ranks have started when it returns, with what torch would import at the first optimizer, for seconds."""
    import torch._dynamo  # noqa: F401


def error_of(call: Callable[[], Any]) -> str:
    """What was raised, as it has to be."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")
