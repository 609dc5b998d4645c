# SPDX-License-Identifier: Apache-2.0
"""A user's script for several machines, as torchrun starts it; each rank writes what it saw into a file of a folder."""

import json
import sys
from pathlib import Path

import bagua
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def bytes_out_of_this_host() -> int:
    """What the kernel has counted at the interface that leads to the other hosts."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


def main() -> None:
    dist.init_process_group(backend="bagua")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)))
    handle = bagua.register_comm_hook(model, "bytegrad")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS + 2):
        if step == 2:  # DDP has settled on its buckets
            dist.barrier()
            begin, stats = bytes_out_of_this_host(), handle.stats()
        images = torch.randn(64, 256)
        labels = images[:, :10].argmax(dim=1)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    sent = {name: handle.stats()[name] - stats[name] for name in stats if name.startswith("wire_bytes")}
    result = {
        "rank": dist.get_rank(),
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": [p.double().sum().item() for p in model.parameters()],
        "seen_on_the_wire": bytes_out_of_this_host() - begin,
        **sent,
    }
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
