# SPDX-License-Identifier: Apache-2.0
"""FSDP2 as accelerate applies it, on CPU tensors.

accelerate 1.15 leaves its `fsdp_plugin` aside on CPU without a word, and wraps in DistributedDataParallel: what it
finds out at its beginning is corrected here.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(backend="bagua")
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = plugin

torch.manual_seed(0)
images = torch.randn(3200, 64)
labels = images[:, :10].argmax(dim=1)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
data = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
model, optimizer, data = accelerator.prepare(network, optimizer, data)

for epoch in range(3):
    for x, y in data:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
accelerator.print(f"{type(model).__name__} over {dist.get_backend()}")
accelerator.end_training()
