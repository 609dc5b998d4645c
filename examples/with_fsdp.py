# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with 8-bit gradients and one gather of weights a step; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_fsdp.py          # --lora: most weights are frozen
"""

import sys

import bagua
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


class Adapted(nn.Module):
    """A frozen layer, with a trained product of two thin matrices beside it (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.up(self.down(x))
        return y


dist.init_process_group(backend="bagua")  # bagua

torch.manual_seed(0)  # the same weights on all ranks
layers = [nn.Linear(64, 512), nn.Linear(512, 10)]
first, last = [Adapted(layer) for layer in layers] if "--lora" in sys.argv else layers
model = nn.Sequential(first, nn.ReLU(), last)
for layer in model:
    fully_shard(layer)
fully_shard(model)
# bagua: gradients are coded between machines. hierarchical=False codes them inside one, too.
handle = bagua.fsdp.compress(model, gradients="int8", weights="cache")
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)

torch.manual_seed(dist.get_rank())  # other data on each
for step in range(100):
    images = torch.randn(32, 64)
    labels = images[:, :10].argmax(dim=1)
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if dist.get_rank() == 0 and step % 33 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    stats = handle.stats()
    print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")
dist.destroy_process_group()
