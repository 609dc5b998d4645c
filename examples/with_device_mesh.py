# SPDX-License-Identifier: Apache-2.0
"""DeviceMesh, DTensor and tensor parallelism over backend "bagua"; the line marked `bagua` is the change.

torchrun --standalone --nproc-per-node 2 examples/with_device_mesh.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group(backend="bagua")  # bagua
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))

# A matrix of which every rank holds some rows; multiplied, and brought together.
rows = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
product = (rows @ distribute_tensor(torch.eye(2), mesh, [Replicate()])).redistribute(mesh, [Shard(1)])
assert torch.equal(product.full_tensor(), torch.arange(12.0).reshape(6, 2))

# A network whose first layer is split by columns, the second by rows: one all-reduce in each forward.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
x = torch.randn(8, 64)
expected = model(x)
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
difference = (model(x) - expected).abs().max().item()
if dist.get_rank() == 0:
    print(f"this rank holds {model[0].weight.to_local().numel():,} of {model[0].weight.numel():,} weights")
    print(f"largest difference to the network on one rank: {difference:.1e}")
dist.destroy_process_group()
