# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over backend "bagua", in full precision; the line marked `bagua` is the change.

torchrun --standalone --nproc-per-node 2 examples/with_fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group(backend="bagua")  # bagua

torch.manual_seed(0)  # the same weights on all ranks
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

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
dist.destroy_process_group()
