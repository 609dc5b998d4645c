# SPDX-License-Identifier: Apache-2.0
"""Trainings with a hook that tests call the handle of."""

from collections.abc import Callable
from typing import NamedTuple

import bagua
import torch
import torch.distributed as dist
from hooked_models import SMALL_BUCKETS, loss_of, perceptron
from torch.nn.parallel import DistributedDataParallel as DDP

MOMENTS = ["before the first step", "between forward and backward", "between backward and step", "after steps"]
HOSTS = "ABC"
SECONDS = 60.0  # a rank that waits for another which raised is a failure


class Trained(NamedTuple):
    ddp: DDP
    optimizer: torch.optim.Optimizer
    handle: bagua.Handle


def hooked(algorithm: str, group: dist.ProcessGroup | None = None) -> Trained:
    ddp = DDP(perceptron(), process_group=group, **SMALL_BUCKETS)
    optimizer: torch.optim.Optimizer
    if bagua.describe(algorithm)["optimizer"] == "QAdamOptimizer":
        optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=2)
    else:
        # It has momenta, which differ where weights do, and counts steps on the CPU.
        optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    return Trained(ddp, optimizer, bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer))


def train_step(trained: Trained, number: int, at: Callable[[str], None] = lambda moment: None) -> float:
    trained.optimizer.zero_grad()
    loss = loss_of(trained.ddp, number)
    at(MOMENTS[1])
    loss.backward()
    at(MOMENTS[2])
    trained.optimizer.step()
    return loss.item()
