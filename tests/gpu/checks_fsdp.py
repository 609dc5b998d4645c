# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over our collectives, beside the same training on one rank; on the CPU, too."""

import copy

import torch
import torch.distributed as dist
from check import assert_same_on_all_ranks, check
from devices import randn
from hooked_models import perceptron
from torch import nn

STEPS = 4


def _train(model: nn.Module, ranks: range) -> None:
    """Each rank of `ranks` brings its batch; the gradients are the mean over all of them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [randn(8, 23, seed=10 * step + rank) for rank in ranks]
        torch.stack([model(batch).square().mean() for batch in batches]).mean().backward()
        optimizer.step()


@check(seconds=30)
def fsdp2_trains_as_one_rank_does() -> None:
    from torch.distributed.fsdp import fully_shard  # takes seconds, in every process that only looks for tests

    whole = perceptron()
    sharded = copy.deepcopy(whole)
    for layer in sharded.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(sharded)
    _train(sharded, range(dist.get_rank(), dist.get_rank() + 1))
    _train(whole, range(dist.get_world_size()))
    found = [p.full_tensor() for p in sharded.parameters()]  # type: ignore[attr-defined]
    for one, other in zip(found, whole.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)
    assert_same_on_all_ranks(found)
