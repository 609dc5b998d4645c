# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a DistributedDataParallel model; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_compile.py
"""

import bagua
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="bagua")  # bagua
torch.manual_seed(dist.get_rank())

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
handle = bagua.register_comm_hook(model, "bytegrad")  # bagua: on the model that DDP wraps
compiled = torch.compile(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for step in range(100):
    images = torch.randn(32, 64)
    labels = images[:, :10].argmax(dim=1)
    loss = cross_entropy(compiled(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 33 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

if dist.get_rank() == 0:
    stats = handle.stats()
    print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")
dist.destroy_process_group()
