# SPDX-License-Identifier: Apache-2.0
"""A user's script that is started by torchrun; prints what each rank came to.

Written for `pytorch_lightning`.
"""

import json
import sys
from typing import Any

import pytorch_lightning as pl
import torch
from bagua.pytorch_lightning import BaguaStatsCallback, BaguaStrategy
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Linear(40, 40)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, pl.strategies.DDPStrategy)
        stats = strategy.handle.stats()  # type: ignore[attr-defined]
        weights = [w.double().sum().item() for w in self.parameters()]
        print(json.dumps({"rank": strategy.global_rank, "stats": stats, "weights": weights}), flush=True)


# The name goes to the registry of pytorch_lightning, the instance is of its DDPStrategy.
strategy: Any = sys.argv[1] if sys.argv[1] != "instance" else BaguaStrategy("bytegrad")
stats: Any = BaguaStatsCallback()
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=1,
    num_nodes=2,
    max_epochs=1,
    logger=pl.loggers.CSVLogger(sys.argv[2]),
    log_every_n_steps=2,
    callbacks=[stats],
    enable_checkpointing=False,
    enable_progress_bar=False,
)
data = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
trainer.fit(Module(), DataLoader(TensorDataset(data), batch_size=4))
