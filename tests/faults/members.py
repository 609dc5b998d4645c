# SPDX-License-Identifier: Apache-2.0
"""A group whose members change, and a training on it, for tests of reconfigure."""

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import bagua
import torch
import torch.distributed as dist
from bagua.elastic import heal
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import meet, store


class Members:
    """A group that each rank makes alone, and the handles of all."""

    def __init__(self) -> None:
        self.me, size, shared = dist.get_rank(), dist.get_world_size(), store()
        dist.destroy_process_group()
        dist.init_process_group(
            "bagua",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=30),
            enable_reconfigure=True,
        )
        self.shared = shared
        self._number = 0
        shared.set(f"handle/{self.me}", dist._get_reconfigure_handle())
        self.handles = [shared.get(f"handle/{rank}").decode() for rank in range(size)]

    def become(self, *who: int, seconds: float = 30.0, unordered: bool = False) -> None:
        """Make the group consist of these; the same calls on all of them."""
        self._number += 1
        self.reconfigure([self.handles[rank] for rank in who], (self._number, *who), seconds, unordered=unordered)

    def reconfigure(self, handles: Sequence[str], uuid: object, seconds: float, *, unordered: bool = False) -> None:
        given: Any = set(handles) if unordered else list(handles)
        dist._reconfigure(hash(uuid) % 2**31, given, timeout=timedelta(seconds=seconds)).wait()

    def wait_for_all(self, name: str, size: int = 3) -> None:
        meet(self.shared, name, size)


def model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


# Each with options with which it communicates in all of a few steps, and codes between any two ranks.
HOOKS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "quantized_allreduce": {"hierarchical": False, "codec": "2bit"},
    "powersgd": {"hierarchical": False, "start_step": 2, "min_compression": 1e-6},
    "qadam": {"hierarchical": False, "codec": "1bit", "error_feedback": True},
    "decentralized": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "async": {"sync_interval_ms": 1},
    "local_sgd": {"sync_every": 2},
    "diloco": {"sync_every": 4, "fragments": 2, "delay": 1, "codec": "int8"},
}


class Training:
    """A model with a hook, made in a world of one, as a replica that may join others has to."""

    def __init__(self, members: Members, algorithm: str, **options: Any) -> None:
        members.become(members.me)
        self.ddp = DDP(model(), bucket_cap_mb=0.001)
        if algorithm == "qadam":
            self.optimizer: torch.optim.Optimizer = bagua.QAdamOptimizer(self.ddp.parameters(), 0.01, 2, eps=0.1)
        else:
            self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.05, momentum=0.5)
        options = options or HOOKS[algorithm]
        self.handle = bagua.register_comm_hook(self.ddp, algorithm, optimizer=self.optimizer, **options)
        self.steps = 0
        for _ in range(2):  # DDP lays its buckets out after the first
            self.backward(0)
        self.optimizer.zero_grad()

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()
        self.steps += 1

    def steps_until_one_fails(self) -> None:
        # By time: where nothing is waited for, thousands of steps go by before a death is noticed.
        end = time.monotonic() + 30
        for number in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(1000)):
            self.step(number)

    def heal(self) -> None:
        """Have those who are behind take what the furthest has."""
        self.steps = heal(self.ddp, self.optimizer, self.handle, step=self.steps)

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.ddp.parameters()])
