# SPDX-License-Identifier: Apache-2.0
"""Hugging Face accelerate; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py

With --rounds behind it: weights in rounds, not gradients in steps.
"""

import sys

import bagua
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(backend="bagua")  # bagua: accelerate takes over the group that it finds
accelerator = Accelerator(cpu=True)

torch.manual_seed(0)
images = torch.randn(3200, 64)
labels = images[:, :10].argmax(dim=1)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
data = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)

model, optimizer, data = accelerator.prepare(network, optimizer, data)
# bagua: on the model that accelerate has wrapped
if "--rounds" in sys.argv:
    handle = bagua.register_comm_hook(model, "local_sgd", optimizer=optimizer, sync_every=10)
else:
    handle = bagua.register_comm_hook(model, "bytegrad")

for epoch in range(3):
    for x, y in data:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")

handle.synchronize()  # bagua: after rounds all ranks hold the same weights
stats = handle.stats()
accelerator.print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")
accelerator.end_training()
