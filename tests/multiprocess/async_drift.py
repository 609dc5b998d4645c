# SPDX-License-Identifier: Apache-2.0
"""Training with async of which the sum of all weights is known, however its rounds fall.

A round moves weights between ranks; only a rank's own steps, whose gradients are whatever the test says, change their
sum.
"""

import time
from collections.abc import Iterator
from typing import Any

import bagua
import torch
import torch.distributed as dist
from devices import settle
from holdings import wait_for
from hooked_models import Leaves, same_everywhere
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTH = 11
SECONDS = 20.0  # for a test that takes one or two: a hang is a failure
INTERVAL = 0.001  # seconds between rounds, and between looks at whether one has come in
ROUNDS = 3  # that a training has to have seen


class Drift:
    """A model whose weights fall by rank + 1 with every step."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.ddp = DDP(Leaves(LENGTH, dtype=dtype))
        self.weight: Tensor = self.ddp.module.leaves[0]
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1.0)
        self.handle = bagua.register_comm_hook(
            self.ddp, "async", optimizer=self.optimizer, **{"sync_interval_ms": 1, **options}
        )
        self.gradient = torch.full((LENGTH,), dist.get_rank() + 1.0, dtype=dtype)
        # Steps of the optimizer.
        self.taken = 0
        self._before_forward = self.handle.stats()

    def forward(self) -> Tensor:
        self._before_forward = self.handle.stats()
        loss: Tensor = self.ddp([self.gradient])
        return loss

    def step(self, pause: float = INTERVAL) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()
        self.taken += 1
        time.sleep(pause)

    def steps(self, count: int, pause: float = INTERVAL) -> None:
        for _ in range(count):
            self.step(pause)

    def numbers(self, least: int, rounds: int = ROUNDS) -> Iterator[int]:
        """Count what the caller repeats: `least` times, and on until there have been so many more rounds."""
        before, number = self.rounds(), 0
        while number < least or (dist.get_world_size() > 1 and self.rounds() - before < rounds):
            yield number
            number += 1

    def steps_with_rounds(self, least: int, rounds: int = ROUNDS, pause: float = INTERVAL) -> None:
        for _ in self.numbers(least, rounds):
            self.step(pause)

    def await_round(self) -> None:
        """Wait until an average has come in since the last forward, if that has begun a round: there is one to add."""
        before = self._before_forward
        if self.handle.stats()["logical_bytes"] > before["logical_bytes"]:
            seconds = before["seconds"].get("average_weights")
            assert wait_for(lambda: self.handle.stats()["seconds"].get("average_weights") != seconds, SECONDS)

    def end(self, steps: int | None = None) -> None:
        """Abort the rounds: all ranks then hold the mean of what each has done by so many steps of its own."""
        self.handle.abort()
        self.agree(steps)

    def agree(self, steps: int | None = None) -> None:
        """Assert that after an abort all hold the same bits, and the mean of what every rank has done by its own steps.

        Steps are those of the optimizer where none are given.
        """
        assert same_everywhere(self.weight)
        counts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(counts, self.taken if steps is None else steps)
        of_ranks = [(rank + 1) * count for rank, count in enumerate(counts)]
        # A round rounds three times numbers of at most the sum of all steps; there are at most as many rounds as steps.
        tolerance = 3 * max(counts) * 6e-8 * sum(of_ranks)
        expected = torch.full((LENGTH,), -sum(of_ranks) / len(counts))
        torch.testing.assert_close(self.copy(), expected, rtol=0, atol=tolerance)

    def copy(self) -> Tensor:
        return self.weight.detach().clone()

    def rounds(self) -> int:
        rounds: int = self.handle.stats()["rounds"]
        return rounds


def let_rounds_come_in() -> None:
    """Wait until the round that all ranks have begun has ended here, and the interval after it.

    By a barrier behind it, in the order of the group that the newest hook has for its rounds. Ranks have to call it
    after the same number of rounds.
    """
    *_, group = [group for group in dist.distributed_c10d._world.pg_map if "_bagua_hook_" in group.group_name]
    dist.barrier(group)
    settle()
    time.sleep(2 * INTERVAL)
