# SPDX-License-Identifier: Apache-2.0
"""The short form of the soak; `make soak` is the long one. Also: the same training twice gives the same bits."""

import hashlib
import os
from typing import Any
from unittest import mock

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import Pools
from soak_ranks import soak
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# 255 calls: one group is renewed on the way.
@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "one host"), (3, "an uneven pair"), (4, "two hosts"), (8, "one host")]
)
def test_random_operations_give_what_a_plain_reference_gives(world_size: int, layout: str) -> None:
    assert soak(world_size, seed=world_size, operations=255, layout=layout, timeout=240.0) > 255


_HOSTS = {"one host": "aaaa", "two hosts": "abab", "a host each": "abcd"}


def _train(algorithm: str, hosts: str) -> str:
    """Train a small model on emulated hosts and return a hash of its weights."""
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(19, 64), nn.ReLU(), nn.Linear(64, 3001))
    with mock.patch.dict(os.environ, BAGUA_HOST_ID=hosts[rank]):
        group = dist.new_group()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if algorithm == "qadam":
        optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=4)
    # By default nothing is compressed on a single host.
    options: dict[str, Any] = {} if algorithm == "gradient_allreduce" else {"hierarchical": False}
    bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
    for step in range(12):
        inputs = torch.randn(8, 19, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    dist.destroy_process_group(group)
    return hashlib.sha256(weights).hexdigest()


# async is left out: it averages when the network has time.
@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        ("gradient_allreduce", "two hosts"),
        ("bytegrad", "a host each"),
        ("decentralized", "one host"),
        ("low_precision_decentralized", "two hosts"),
        ("qadam", "a host each"),
    ],
)
def test_the_same_training_gives_the_same_bits(rank_pools: Pools, algorithm: str, layout: str) -> None:
    runs = [rank_pools[4].run(_train, algorithm, _HOSTS[layout]) for _ in range(2)]
    assert runs[0] == runs[1]
