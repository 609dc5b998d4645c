# SPDX-License-Identifier: Apache-2.0
"""The collectives that can be timed, each with its buffers and a check of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, partial
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

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Data:
    """What a part of a result has to be: the data of a rank (None: the sum of all ranks') from element `begin` on."""

    rank: int | None
    begin: int = 0

    def values(self, ranks: int, start: int, stop: int) -> torch.Tensor:
        start, stop = self.begin + start, self.begin + stop
        return pattern.sums(ranks, start, stop) if self.rank is None else pattern.values(self.rank, start, stop)


class Collective(ABC):
    """One collective at one size, which is that of the larger of its buffers."""

    is_in_place: ClassVar[bool] = False
    # Which of the buffers holds the part of one rank only.
    gives_part: ClassVar[bool] = False
    gets_part: ClassVar[bool] = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self._part = place.count // place.ranks
        self._input = self._output = place.zeros(self._part if self.gives_part else place.count)
        if not self.is_in_place:
            self._output = place.zeros(self._part if self.gets_part else place.count)
            pattern.fill(self._input, place.rank)

    @staticmethod
    def bus_factor(ranks: int) -> float:
        """Bytes that each rank has to send per byte of size, whatever the implementation."""
        return (ranks - 1) / ranks

    @abstractmethod
    def step(self) -> None:
        """Do the collective once and wait for it."""

    @abstractmethod
    def expected(self) -> list[_Data]:
        """Return what the equal parts of the result have to be; nothing where this rank gets none."""

    def check(self) -> str:
        """Return "" where the result is right, else what is wrong with it. Collective."""
        self._output.zero_()
        pattern.fill(self._input, self.place.rank)
        self.step()
        result = self._output.clone()
        if self.is_in_place:
            self._output.zero_()  # repeated sums would overflow
        expected = self.expected()
        if not expected:
            return ""
        for data, part in zip(expected, result.chunk(len(expected)), strict=True):
            wrong = pattern.difference(part, partial(data.values, self.place.ranks))
            if wrong:
                return wrong if len(expected) == 1 else f"in the part of rank {data.rank}, {wrong}"
        return ""


class AllReduce(Collective):
    """Sum, in place."""

    is_in_place = True
    bus_factor = staticmethod(lambda ranks: 2 * (ranks - 1) / ranks)

    def step(self) -> None:
        dist.all_reduce(self._output, group=self.place.group)

    def expected(self) -> list[_Data]:
        return [_Data(None)]


class Broadcast(Collective):
    """From rank 0, in place."""

    is_in_place = True
    bus_factor = staticmethod(lambda ranks: 1.0)

    def step(self) -> None:
        dist.broadcast(self._output, group=self.place.group, group_src=0)

    def expected(self) -> list[_Data]:
        return [_Data(0)]


class Reduce(Collective):
    """Sum, to rank 0."""

    is_in_place = True
    bus_factor = staticmethod(lambda ranks: 1.0)

    def step(self) -> None:
        dist.reduce(self._output, group=self.place.group, group_dst=0)

    def expected(self) -> list[_Data]:
        return [_Data(None)] if self.place.rank == 0 else []


class AllGather(Collective):
    """Equal parts; the size is that of the result."""

    gives_part = True

    def step(self) -> None:
        dist.all_gather_into_tensor(self._output, self._input, group=self.place.group)

    def expected(self) -> list[_Data]:
        return [_Data(rank) for rank in range(self.place.ranks)]


class ReduceScatter(Collective):
    """Sum in equal parts; the size is that of the input."""

    gets_part = True

    def step(self) -> None:
        dist.reduce_scatter_tensor(self._output, self._input, group=self.place.group)

    def expected(self) -> list[_Data]:
        return [_Data(None, self.place.rank * self._part)]


class AllToAll(Collective):
    """A part of every rank's tensor to every rank."""

    def step(self) -> None:
        dist.all_to_all_single(self._output, self._input, group=self.place.group)

    def expected(self) -> list[_Data]:
        return [_Data(rank, self.place.rank * self._part) for rank in range(self.place.ranks)]


class SendRecv(Collective):
    """Every rank sends to the next and receives from the one before."""

    bus_factor = staticmethod(lambda ranks: 1.0)

    def step(self) -> None:
        group, rank, ranks = self.place.group, self.place.rank, self.place.ranks
        messages = [
            dist.P2POp(dist.isend, self._input, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, self._output, group=group, group_peer=(rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def expected(self) -> list[_Data]:
        return [_Data((self.place.rank - 1) % self.place.ranks)]


class Barrier(Collective):
    """No data, hence one size only."""

    bus_factor = staticmethod(lambda ranks: 0.0)
    _checks: ClassVar[dict[str, int]] = {}

    def step(self) -> None:
        dist.barrier(group=self.place.group)

    def expected(self) -> list[_Data]:
        return []

    def check(self) -> str:
        """Have each rank say in the store that it has come before it goes in; who is out again must find them all."""
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
