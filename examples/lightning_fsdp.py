# SPDX-License-Identifier: Apache-2.0
"""Lightning's ModelParallelStrategy with FSDP2 and 8-bit gradients; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/lightning_fsdp.py
"""

import logging
import os

import bagua
import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Sharded(lightning.LightningModule):
    """A network whose layers fully_shard shards."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)
        # bagua: gradients are coded between machines. hierarchical=False codes them inside one, too.
        self.handle = bagua.fsdp.compress(self.network, weights="cache")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        if self.global_rank == 0 and self.global_step % 33 == 0:
            print(f"step {self.global_step}: loss {loss.item():.3f}")
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        accuracy = (self.network(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def on_validation_end(self) -> None:
        if self.global_rank == 0 and self.global_step:
            print(f"step {self.global_step}: accuracy {self.trainer.callback_metrics['accuracy'].item():.3f}")

    def on_train_end(self) -> None:
        stats = self.handle.stats()
        if self.global_rank == 0:
            print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
images = torch.randn(7040, 64)
labels = images[:, :10].argmax(dim=1)
data = DataLoader(TensorDataset(images[:6400], labels[:6400]), batch_size=32)
validation_data = DataLoader(TensorDataset(images[6400:], labels[6400:]), batch_size=32)
# As many as torchrun has started.
ranks, machines = int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
strategy = ModelParallelStrategy(ranks, tensor_parallel_size=1, process_group_backend="bagua")  # bagua
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks // machines,
    num_nodes=machines,
    strategy=strategy,
    max_steps=100,
    # Under torch.inference_mode() FSDP2 makes weights that cannot be trained.
    inference_mode=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Sharded(), data, validation_data)
