# SPDX-License-Identifier: Apache-2.0
"""accelerate's FSDP2 plugin with 8-bit gradients and one gather of weights a step; marked `bagua` is the change.

torchrun --standalone --nproc-per-node 2 examples/with_accelerate_fsdp.py
"""

import bagua
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(backend="bagua")  # bagua
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
# accelerate 1.15 leaves its `fsdp_plugin` aside on CPU without a word. On GPUs leave these two lines out.
accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = plugin

torch.manual_seed(0)
images = torch.randn(3200, 64)
labels = images[:, :10].argmax(dim=1)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
data = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
model, optimizer, data = accelerator.prepare(network, optimizer, data)
# bagua: gradients are coded between machines. hierarchical=False codes them inside one, too.
handle = bagua.fsdp.compress(model, weights="cache")

for epoch in range(3):
    for x, y in data:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
stats = handle.stats()
accelerator.print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")
accelerator.end_training()
