# SPDX-License-Identifier: Apache-2.0
"""Training with async of which the sum of all weights is known, however its rounds fall.

A round moves weights between ranks; only a rank's own steps, whose gradients are whatever the test says, change their
sum.
"""

import time
from typing import Any

import bagua
import torch
import torch.distributed as dist
from hooked_models import Leaves
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTH = 11
SECONDS = 20.0  # for a test that takes one or two: a hang is a failure
PAUSE = 0.02  # long enough for a round between processes of one machine, and for the interval of 1 ms


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

    def forward(self) -> Tensor:
        loss: Tensor = self.ddp([self.gradient])
        return loss

    def step(self, pause: float = PAUSE) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()
        time.sleep(pause)

    def steps(self, count: int, pause: float = PAUSE) -> None:
        for _ in range(count):
            self.step(pause)

    def copy(self) -> Tensor:
        return self.weight.detach().clone()

    def rounds(self) -> int:
        rounds: int = self.handle.stats()["rounds"]
        return rounds


def assert_agree(weights: list[Tensor], steps: list[int]) -> None:
    """All hold the same bits, and the mean of what every rank has done by its own steps."""
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    mean = -sum((rank + 1) * count for rank, count in enumerate(steps)) / len(steps)
    # A round rounds three times numbers of at most the sum of all steps; there are at most as many rounds as steps.
    most = sum((rank + 1) * count for rank, count in enumerate(steps))
    tolerance = 3 * max(steps) * 6e-8 * most
    torch.testing.assert_close(weights[0], torch.full((LENGTH,), mean), rtol=0, atol=tolerance)
