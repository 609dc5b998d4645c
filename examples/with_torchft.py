# SPDX-License-Identifier: Apache-2.0
"""torchft: replicas that may die and come back while the others go on; the lines marked `bagua` are the change.

torchft_lighthouse --min_replicas 1 &
TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA=0 python examples/with_torchft.py &
TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA=1 python examples/with_torchft.py

Kill one and start it again: it takes its weights from the other. For torchft's nightly version and torch 2.14 or later;
torchft 0.2, or an earlier torch, takes `bagua.torchft.ProcessGroupBagua(timeout=timedelta(seconds=5))` in place of the
group, and its own DistributedDataParallel.
"""

import os
import time
from datetime import timedelta

import bagua  # bagua
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, Optimizer

replica = int(os.environ["REPLICA"])
steps = int(os.environ.get("STEPS", "100"))
# Of the ranks of one replica, here one.
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

# bagua: in place of "gloo". Alone, until the manager brings the replicas together.
dist.init_process_group(
    "bagua",
    store=dist.HashStore(),
    rank=0,
    world_size=1,
    enable_reconfigure=True,
)

torch.manual_seed(replica)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
adam = torch.optim.Adam(network.parameters(), lr=3e-3)


def load(state: dict) -> None:
    """Take over the weights of a replica that is further."""
    network.load_state_dict(state["network"])
    adam.load_state_dict(state["optimizer"])


manager = Manager(
    pg=dist.group.WORLD,
    load_state_dict=load,
    state_dict=lambda: {"network": network.state_dict(), "optimizer": adam.state_dict()},
    min_replica_size=1,
    replica_id=f"replica_{replica}",
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=timedelta(seconds=10),
)
model = DistributedDataParallel(network)
bagua.register_comm_hook(model, "bytegrad", manager=manager)  # bagua: in place of torchft's DistributedDataParallel
optimizer = Optimizer(manager, adam)

while manager.current_step() < steps:
    images = torch.randn(32, 64)
    labels = images[:, :10].argmax(dim=1)
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    time.sleep(float(os.environ.get("PAUSE", "0")))
    if manager.current_step() % 10 == 0 or "PAUSE" in os.environ:
        print(
            f"step {manager.current_step()}: {manager.num_participants()} replicas, loss {loss.item():.3f}", flush=True
        )
weights = torch.cat([p.detach().flatten() for p in network.parameters()])
print(f"weights {weights.double().sum().item():.12f}", flush=True)
manager.shutdown(wait=False)
