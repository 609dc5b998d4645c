# SPDX-License-Identifier: Apache-2.0
"""A replica under torchft's Manager, as a user writes it: stock DDP with ALGORITHM on it, or torchft's own DDP.

After each step that counts it prints which it was, with how many replicas, and a digest of weights and momenta.
"""

import hashlib
import os
import signal
import time
from datetime import timedelta
from typing import Any

import bagua
import torch
import torch.distributed as dist
import torchft
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torchft import Manager, Optimizer

replica = int(os.environ["REPLICA"])
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
# The group's own timeout stays at torch's ten minutes: the Manager's is the one that counts.
dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
torch.manual_seed(replica)
network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
sgd = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)


def load(state: dict[str, Any]) -> None:
    """Take over what a replica has that is further."""
    network.load_state_dict(state["network"])
    sgd.load_state_dict(state["optimizer"])


def digest() -> str:
    """Return a text that differs where one bit does."""
    momenta = [value for state in sgd.state.values() for value in state.values() if value is not None]
    parts = [tensor.detach().numpy().tobytes() for tensor in [*network.parameters(), *momenta]]
    return hashlib.sha256(b"".join(parts)).hexdigest()


manager = Manager(
    pg=dist.group.WORLD,
    load_state_dict=load,
    state_dict=lambda: {"network": network.state_dict(), "optimizer": sgd.state_dict()},
    min_replica_size=1,
    replica_id=f"replica_{replica}",
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=timedelta(seconds=float(os.environ.get("TIMEOUT", "20"))),
)
# Several buckets.
if "ALGORITHM" in os.environ:
    model = DDP(network, bucket_cap_mb=0.1)
    bagua.register_comm_hook(model, os.environ["ALGORITHM"], manager=manager)
else:
    model = torchft.DistributedDataParallel(manager, network, bucket_cap_mb=0.1)
optimizer = Optimizer(manager, sgd)


def die(gradient: torch.Tensor) -> None:
    """Die in the middle of a backward, when buckets of later layers are on their way."""
    if manager.current_step() == int(os.environ.get("DIES_AFTER", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


network[0].register_forward_hook(lambda _module, _inputs, output: output.register_hook(die) and None)

while manager.current_step() < int(os.environ["STEPS"]):
    images = torch.randn(32, 64)
    optimizer.zero_grad()
    cross_entropy(model(images), images[:, :10].argmax(dim=1)).backward()
    before = manager.current_step()
    optimizer.step()
    if manager.current_step() > before:
        participants = manager.num_participants()
        print(f"step {manager.current_step()}: {participants} replicas, {digest()}", flush=True)
    time.sleep(0.05)
manager.shutdown(wait=False)
