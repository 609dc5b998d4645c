# SPDX-License-Identifier: Apache-2.0
"""Processes may die and join at any time, and the training goes on; the lines marked `bagua` are the change.

python -m bagua.elastic --port 29510 &
python examples/elastic.py localhost 29510 &
python examples/elastic.py localhost 29510

Kill one and start it again: it takes over what the other has come to. On several machines, name the one with the store.
"""

import sys
import time

import bagua.elastic
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

host, port, *more = sys.argv[1:]
steps = int(more[0]) if more else 200
store = dist.TCPStore(host, int(port))

with bagua.elastic.Members(store) as members:  # bagua: in place of init_process_group
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = members.train(model, optimizer, "bytegrad")  # bagua
    while training.step < steps:  # bagua: in place of a count of its own
        with training.attempt():  # bagua
            images = torch.randn(32, 64)
            labels = images[:, :10].argmax(dim=1)
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if training.step % 10 == 0:
            print(f"step {training.step}: {dist.get_world_size()} members, loss {loss.item():.3f}", flush=True)
        time.sleep(0.02)
    print(f"weights {model.module[0].weight.sum().item():.9f}")
