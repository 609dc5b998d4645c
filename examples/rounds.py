# SPDX-License-Identifier: Apache-2.0
"""Evaluates between rounds, where ranks hold different weights; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/rounds.py
"""

import bagua
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="bagua")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
# bagua: every rank trains on its own; weights are exchanged in the background, once in many steps.
handle = bagua.register_comm_hook(model, "diloco", optimizer=optimizer)


def batch(size: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and the labels that can be read from them."""
    images = torch.randn(size, 64, generator=generator)
    return images, images[:, :10].argmax(dim=1)


held_out = batch(1000, torch.Generator().manual_seed(7))
for step in range(1, 301):
    images, labels = batch(32)
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        handle.synchronize()  # bagua: ends the round; all ranks hold the same weights
        with torch.no_grad():
            loss = cross_entropy(model.module(held_out[0]), held_out[1])
        losses = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss)
        if dist.get_rank() == 0:
            print(f"step {step}: held-out loss {' and '.join(f'{each.item():.6f}' for each in losses)}")
handle.abort()  # bagua: ends the background work, on all ranks together
dist.destroy_process_group()
