# SPDX-License-Identifier: Apache-2.0
"""A member on an emulated host, for test_elastic_hosts.py: elastic_host.py NUMBER ADDRESS-OF-THE-STORE PORT FILE

It trains until the step that is written in FILE, once there is one, and prints each step with the number of members,
and a digest of its weights at the end.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from datetime import timedelta
from pathlib import Path

import bagua.elastic
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Steps of a model this small would be thousands.
PAUSE = 0.1


def main() -> None:
    number, address, port, last = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    store = dist.TCPStore(address, port, timeout=timedelta(seconds=60))
    with bagua.elastic.Members(store, at_least=3) as members:
        torch.manual_seed(number)
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(network.parameters(), 0.001)
        training = members.train(DDP(network), optimizer, "bytegrad")
        members._group._meetings.at_least = 1
        while training.step < (int(last.read_text()) if last.exists() else math.inf):
            with training.attempt():
                generator = torch.Generator().manual_seed(100 * training.step + dist.get_rank())
                inputs = torch.randn(8, 64, generator=generator)
                optimizer.zero_grad()
                (training.ddp(inputs) - inputs).square().mean().backward()
                optimizer.step()
            print(f"step {training.step} of {dist.get_world_size()}", flush=True)
            time.sleep(PAUSE)
    weights = b"".join(p.detach().numpy().tobytes() for p in network.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
