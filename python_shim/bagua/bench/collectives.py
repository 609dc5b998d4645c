# SPDX-License-Identifier: Apache-2.0
"""The collectives that can be timed, each with its buffers and a check of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from bagua.bench import pattern


@dataclass(frozen=True)
class Place:
    """Where a case runs, and with how much."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    count: int

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """The number of ranks of the group."""
        return dist.get_world_size(self.group)

    def empty(self, count: int) -> torch.Tensor:
        """Return a tensor of `count` zeros."""
        return torch.zeros(count, dtype=self.dtype, device=self.device)


class Collective(ABC):
    """One collective at one size."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @staticmethod
    @abstractmethod
    def bus_factor(ranks: int) -> float:
        """Bytes that each rank has to send per byte of size, whatever the implementation."""

    @abstractmethod
    def step(self) -> None:
        """Do the collective once and wait for it."""

    @abstractmethod
    def check(self) -> str:
        """Return "" where the result is right, else what is wrong with it. Collective."""


def _no_bytes(ranks: int) -> float:
    return 0.0


class _InPlace(Collective):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._tensor = place.empty(place.count)

    def _result(self) -> torch.Tensor:
        pattern.fill(self._tensor, self.place.rank)
        self.step()
        result = self._tensor.clone()
        self._tensor.zero_()  # repeated sums would overflow
        return result


class _OutOfPlace(Collective):
    def __init__(self, place: Place, count_in: int, count_out: int) -> None:
        super().__init__(place)
        self._input = place.empty(count_in)
        self._output = place.empty(count_out)
        pattern.fill(self._input, place.rank)

    @property
    def _part(self) -> int:
        return self.place.count // self.place.ranks


class AllReduce(_InPlace):
    """Sum, in place."""

    @staticmethod
    def bus_factor(ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def step(self) -> None:
        dist.all_reduce(self._tensor, group=self.place.group)

    def check(self) -> str:
        return pattern.difference(self._result(), lambda start, stop: pattern.sums(self.place.ranks, start, stop))


class Broadcast(_InPlace):
    """From rank 0, in place."""

    @staticmethod
    def bus_factor(ranks: int) -> float:
        return 1.0

    def step(self) -> None:
        dist.broadcast(self._tensor, group=self.place.group, group_src=0)

    def check(self) -> str:
        return pattern.difference(self._result(), lambda start, stop: pattern.values(0, start, stop))


class Reduce(_InPlace):
    """Sum, to rank 0."""

    @staticmethod
    def bus_factor(ranks: int) -> float:
        return 1.0

    def step(self) -> None:
        dist.reduce(self._tensor, group=self.place.group, group_dst=0)

    def check(self) -> str:
        result = self._result()
        if self.place.rank != 0:
            return ""
        return pattern.difference(result, lambda start, stop: pattern.sums(self.place.ranks, start, stop))


class AllGather(_OutOfPlace):
    """Equal parts; the size is that of the result."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, place.count // place.ranks, place.count)

    @staticmethod
    def bus_factor(ranks: int) -> float:
        return (ranks - 1) / ranks

    def step(self) -> None:
        dist.all_gather_into_tensor(self._output, self._input, group=self.place.group)

    def check(self) -> str:
        self._output.zero_()
        self.step()
        for rank in range(self.place.ranks):
            part = self._output[rank * self._part : (rank + 1) * self._part]
            wrong = pattern.difference(part, lambda start, stop, rank=rank: pattern.values(rank, start, stop))  # type: ignore[misc]
            if wrong:
                return f"in the part of rank {rank}, {wrong}"
        return ""


class ReduceScatter(_OutOfPlace):
    """Sum in equal parts; the size is that of the input."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, place.count, place.count // place.ranks)

    @staticmethod
    def bus_factor(ranks: int) -> float:
        return (ranks - 1) / ranks

    def step(self) -> None:
        dist.reduce_scatter_tensor(self._output, self._input, group=self.place.group)

    def check(self) -> str:
        self._output.zero_()
        self.step()
        begin = self.place.rank * self._part
        return pattern.difference(
            self._output, lambda start, stop: pattern.sums(self.place.ranks, begin + start, begin + stop)
        )


class AllToAll(_OutOfPlace):
    """A part of every rank's tensor to every rank."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, place.count, place.count)

    @staticmethod
    def bus_factor(ranks: int) -> float:
        return (ranks - 1) / ranks

    def step(self) -> None:
        dist.all_to_all_single(self._output, self._input, group=self.place.group)

    def check(self) -> str:
        self._output.zero_()
        self.step()
        begin = self.place.rank * self._part
        for rank in range(self.place.ranks):
            part = self._output[rank * self._part : (rank + 1) * self._part]
            wrong = pattern.difference(
                part,
                lambda start, stop, rank=rank: pattern.values(rank, begin + start, begin + stop),  # type: ignore[misc]
            )
            if wrong:
                return f"in the part from rank {rank}, {wrong}"
        return ""


class SendRecv(_OutOfPlace):
    """Every rank sends to the next and receives from the one before."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, place.count, place.count)
        self._next = (place.rank + 1) % place.ranks
        self._former = (place.rank - 1) % place.ranks

    @staticmethod
    def bus_factor(ranks: int) -> float:
        return 1.0

    def step(self) -> None:
        group = self.place.group
        messages = [
            dist.P2POp(dist.isend, self._input, group=group, group_peer=self._next),
            dist.P2POp(dist.irecv, self._output, group=group, group_peer=self._former),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def check(self) -> str:
        self._output.zero_()
        self.step()
        return pattern.difference(self._output, lambda start, stop: pattern.values(self._former, start, stop))


class Barrier(Collective):
    """No data, hence one size only."""

    _checks: ClassVar[dict[str, int]] = {}

    bus_factor = staticmethod(_no_bytes)

    def step(self) -> None:
        dist.barrier(group=self.place.group)

    def check(self) -> str:
        # Each rank says in the store that it has come before it goes in; who is out again must find them all.
        store: Any = self.place.group.get_group_store()
        number = self._checks[self.place.group.group_name] = self._checks.get(self.place.group.group_name, 0) + 1
        key = f"bagua.bench.barrier.{number}"
        store.add(key, 1)
        self.step()
        arrived = store.add(key, 0)
        return "" if arrived == self.place.ranks else f"left when {arrived} of {self.place.ranks} ranks had come"


COLLECTIVES: dict[str, type[Collective]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "broadcast": Broadcast,
    "reduce": Reduce,
    "all_to_all": AllToAll,
    "send_recv": SendRecv,
    "barrier": Barrier,
}
