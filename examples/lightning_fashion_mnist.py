# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST with Lightning, its gradients carried by bagua; Lightning starts the ranks itself.

python examples/lightning_fashion_mnist.py --algorithm bytegrad --options '{"hierarchical": false}'
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bagua
import torch
from bagua.lightning import BaguaStatsCallback, BaguaStrategy
from fashion_mnist import DATA, load, mirror_half, residual_network
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.network = residual_network()
        self.algorithm = algorithm

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.network(mirror_half(x)), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        right = (self.network(x).argmax(1) == y).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.algorithm == "qadam":  # which is half optimizer, half communication
            return bagua.QAdamOptimizer(self.parameters(), lr=0.006, warmup_steps=100)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="bytegrad", help="one of bagua.available_algorithms()")
    parser.add_argument("--options", default="{}", type=json.loads, help="the algorithm's options, as JSON")
    parser.add_argument("--accelerator", default="cpu", help="as in Trainer: cpu, cuda")
    parser.add_argument("--devices", default=2, type=int, help="ranks on this machine")
    parser.add_argument("--nodes", default=1, type=int, help="machines; with more than one, start it with torchrun")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--batch", default=128, type=int, help="images per rank and step")
    parser.add_argument("--data", default=DATA, type=Path, help="the folder with the images")
    parser.add_argument("--logs", default="lightning_logs", help="the folder for figures and checkpoints")
    parser.add_argument("--resume", help="a checkpoint to continue from")
    args = parser.parse_args()

    seed_everything(0, verbose=False)
    train_x, train_y, test_x, test_y = load(args.data, torch.device("cpu"))
    options: dict[str, Any] = args.options
    trainer = Trainer(
        strategy=BaguaStrategy(args.algorithm, **options),
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        max_epochs=args.epochs,
        logger=CSVLogger(args.logs, name=None),
        callbacks=[BaguaStatsCallback(), ModelCheckpoint(monitor="accuracy", mode="max")],
    )
    trainer.fit(
        Classifier(args.algorithm),
        DataLoader(TensorDataset(train_x, train_y), args.batch, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(test_x, test_y), args.batch),
        ckpt_path=args.resume,
    )


if __name__ == "__main__":
    main()
