# SPDX-License-Identifier: Apache-2.0
"""Ray Train; the lines marked `bagua` are the change. A worker that dies is started again from the last checkpoint.

python examples/with_ray.py
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import bagua
import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.functional import cross_entropy


def train(config: dict) -> None:
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    handle = bagua.register_comm_hook(model, "bytegrad")  # bagua: on the model that Ray has wrapped
    rank = ray.train.get_context().get_world_rank()

    first = 0
    if ray.train.get_checkpoint():
        with ray.train.get_checkpoint().as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    torch.manual_seed(rank + first)
    for step in range(first, 100):
        if step == 60 and first == 0 and rank == 1 and config["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        images = torch.randn(32, 64)
        labels = images[:, :10].argmax(dim=1)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 33 == 0 or step == 49:
            stats = handle.stats()
            report = {"step": step, "first": first, "loss": loss.item()}
            report |= {"gradients": stats["logical_bytes"], "sent": stats["wire_bytes"]}
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, Path(folder, "state.pt"))
                ray.train.report(report, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


# On several machines, a folder that all of them see.
with tempfile.TemporaryDirectory() as storage:
    result = TorchTrainer(
        train,
        train_loop_config={"dies": "--die" in sys.argv},
        torch_config=TorchConfig(backend="bagua"),  # bagua
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    last = result.metrics
    print(f"step {last['step']}, begun at {last['first']}: loss {last['loss']:.3f}")
    print(f"{last['gradients']:,} bytes of gradients, {last['sent']:,} bytes sent")
