# SPDX-License-Identifier: Apache-2.0
"""Lightning's Fabric; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_fabric.py
"""

import os

import bagua
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

strategy = DDPStrategy(process_group_backend="bagua")  # bagua: in place of strategy="ddp"
# As many ranks as torchrun has started, on as many machines.
devices, machines = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=machines, strategy=strategy)
fabric.launch()

torch.manual_seed(0)
images = torch.randn(3200, 64)
labels = images[:, :10].argmax(dim=1)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
data = fabric.setup_dataloaders(DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True))
model, optimizer = fabric.setup(network, optimizer)
handle = bagua.register_comm_hook(model, "bytegrad")  # bagua: on the model that Fabric has wrapped

for epoch in range(3):
    for x, y in data:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    fabric.print(f"epoch {epoch}: loss {loss.item():.3f}")

stats = handle.stats()
fabric.print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")
