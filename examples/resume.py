# SPDX-License-Identifier: Apache-2.0
"""Saves and loads what an algorithm remembers, under a loss scale; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/resume.py FOLDER     (again, to go on from where it ended)
"""

import sys
from pathlib import Path

import bagua
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="bagua")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
handle = bagua.register_comm_hook(model, "quantized_allreduce", optimizer=optimizer)
if handle.keeps_residuals:
    handle.follow(scaler)  # bagua: error feedback changes its scale with the loss

parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "handle": handle}
# bagua: a file for every rank, as each has residuals of its own.
file = Path(sys.argv[1], f"rank-{rank}-of-{dist.get_world_size()}.pt")
file.parent.mkdir(parents=True, exist_ok=True)
begin = 0
if file.exists():
    saved = torch.load(file, weights_only=True)
    begin = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])

for _ in range(begin, begin + 50):
    images = torch.randn(32, 64)
    labels = images[:, :10].argmax(dim=1)
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

torch.save({"step": begin + 50, **{name: part.state_dict() for name, part in parts.items()}}, file)
if rank == 0:
    print(f"step {begin + 50}: loss {loss.item():.3f}")
dist.destroy_process_group()
