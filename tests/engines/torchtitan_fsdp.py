# SPDX-License-Identifier: Apache-2.0
"""torchtitan's distributed parts over a group that was made first, on CPU tensors. Its trainer wants a GPU.

The group, the clipping and the mean of the losses are torchtitan's; FSDP2 is torch's, as in its trainer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torchtitan.config import CommConfig
from torchtitan.distributed.utils import clip_grad_norm_, dist_mean, init_distributed

dist.init_process_group(backend="bagua")
world_size = init_distributed(CommConfig())

torch.manual_seed(0)
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(100):
    images = torch.randn(32, 64)
    loss = cross_entropy(model(images), images[:, :10].argmax(dim=1))
    optimizer.zero_grad()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 33 == 0:
        # The same on every rank.
        mean = dist_mean(loss.detach(), mesh)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean:.3f}, norm {norm.item():.3f}")
if dist.get_rank() == 0:
    print(f"{world_size} ranks over {dist.get_backend()}")
dist.destroy_process_group()
