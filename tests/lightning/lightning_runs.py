# SPDX-License-Identifier: Apache-2.0
"""A small module and its training, for the tests with Lightning. Used inside ranks.

A test module that imports this one first is skipped where Lightning is not installed.
"""

import logging
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install lightning")
from bagua.lightning import BaguaStrategy
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# Or else a failure is shown below pages of advertisement.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

SAMPLES, BATCH = 64, 4
# Of each of two ranks.
STEPS_PER_EPOCH = SAMPLES // BATCH // 2
# Options with which two ranks on one host have something to compress, and nothing depends on the clock.
DETERMINISTIC: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "decentralized": {"peer_selection_mode": "shift_one", "hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "qadam": {"hierarchical": False},
    "async": {"warmup_steps": 10**6},
    "powersgd": {"start_step": 3, "rank": 2, "min_compression": 0.5},
    # An epoch is two rounds: its end has nothing left to synchronise.
    "local_sgd": {"sync_every": STEPS_PER_EPOCH // 2},
    "diloco": {"sync_every": STEPS_PER_EPOCH // 2, "fragments": 1, "delay": 1, "outer_momentum": 0.3},
}
WEIGHTS_DIFFER = ("decentralized", "low_precision_decentralized")


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(SAMPLES, 9, generator=generator), torch.randn(SAMPLES, 3, generator=generator))


def loader(*, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH, shuffle=shuffle)


class Module(LightningModule):
    def __init__(self, algorithm: str = "", *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        middle = nn.BatchNorm1d(17) if norm else nn.Identity()
        self.network = nn.Sequential(nn.Linear(9, 17), middle, nn.Tanh(), nn.Linear(17, 3))
        self.algorithm = algorithm
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Any:
        return self.network(x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss: Tensor = (self(x) - y).square().mean()
        return loss

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_for(self.algorithm, self)


def optimizer_for(algorithm: str, module: nn.Module) -> torch.optim.Optimizer:
    if algorithm == "qadam":
        return bagua.QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=STEPS_PER_EPOCH // 2)
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def quiet_trainer(strategy: Any, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    defaults = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "enable_model_summary": False}
    return Trainer(strategy=strategy, **{**quiet, **defaults, **options})


def fit(algorithm: str, module: LightningModule | None = None, *, ckpt_path: Any = None, **options: Any) -> Trainer:
    """Trains with DETERMINISTIC options; the trained module is `trainer.lightning_module`."""
    trainer = quiet_trainer(BaguaStrategy(algorithm, **DETERMINISTIC[algorithm]), **options)
    trainer.fit(module or Module(algorithm), loader(), ckpt_path=ckpt_path)
    return trainer


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), f"{name} differs by {(tensor - expected[name]).abs().max()}"


def everyones(tree: Any) -> list[Any]:
    """The objects of all ranks, on all of them."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tree)
    return gathered


def weights_by_hand(algorithm: str, epochs: int = 1, accumulate: int = 1) -> dict[str, Tensor]:
    """What `fit` has to end with: the same training as a loop over stock DDP."""
    module = Module(algorithm)
    optimizer = optimizer_for(algorithm, module)
    ddp = DDP(module, gradient_as_bucket_view=True)
    bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **DETERMINISTIC[algorithm])
    data = samples()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(DataLoader(data, batch_size=BATCH, sampler=sampler)):
            is_synchronised = (index + 1) % accumulate == 0
            ddp.require_backward_grad_sync = is_synchronised
            ((ddp(x) - y).square().mean() / accumulate).backward()
            if is_synchronised:
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(module)
