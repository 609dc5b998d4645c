# SPDX-License-Identifier: Apache-2.0
"""How ranks of a test become members of bagua.elastic."""

from datetime import timedelta

import torch
import torch.distributed as dist
from bagua.elastic import Members, Training
from torch import Tensor
from trouble import served_store, store


def join(at_least: int, address: str = "127.0.0.1") -> tuple[int, dist.Store, Members]:
    """Return who this process is, a store that all share, and what makes it a member; rank 0 serves their store."""
    me, shared = dist.get_rank(), store()
    dist.destroy_process_group()
    members = Members(served_store(shared, me, address), at_least=at_least, timeout=timedelta(seconds=60))
    return me, shared, members


def backward(training: Training) -> None:
    """Compute gradients of what is drawn for this step and rank."""
    generator = torch.Generator().manual_seed(100 * training.step + dist.get_rank())
    training.ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()


def weights_of(training: Training) -> Tensor:
    """Return all weights in a row."""
    return torch.cat([p.detach().flatten() for p in training.ddp.parameters()])
