# SPDX-License-Identifier: Apache-2.0
"""Run by torchrun: trains with a checkpoint after every step; in its first life one rank is killed in the middle.

Every rank has a checkpoint of its own, with the state of the algorithm, and goes on from the newest step that all have.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import bagua
import torch
import torch.distributed as dist
from members import HOOKS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 10
# async averages when there is time for it: what counts is that the model learns.
STEPS_OF_ASYNC = 60
INPUTS, OUTPUTS = 16, 4


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, INPUTS, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs @ torch.linspace(-1, 1, INPUTS * OUTPUTS).view(INPUTS, OUTPUTS)


class Training:
    """A model, its optimizer and the algorithm that communicates for them."""

    def __init__(self, algorithm: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, OUTPUTS))
        self.ddp = DDP(self.model, bucket_cap_mb=0.001)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.ddp.parameters(), 0.02, momentum=0.9)
        if algorithm == "qadam":
            self.optimizer = bagua.QAdamOptimizer(self.ddp.parameters(), lr=1e-3, warmup_steps=3)
        self.handle = bagua.register_comm_hook(self.ddp, algorithm, optimizer=self.optimizer, **HOOKS[algorithm])

    def step(self, number: int, is_deadly: bool) -> None:
        inputs, targets = _batch(1000 * number + dist.get_rank())
        self.optimizer.zero_grad()
        outputs = self.ddp(inputs)
        if is_deadly:
            # In the middle of the backward.
            outputs.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        (outputs - targets).square().mean().backward()
        self.optimizer.step()

    def save(self, file: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "algorithm": self.handle.state_dict(),
        }
        torch.save(state, file.with_suffix(".unfinished"))
        file.with_suffix(".unfinished").replace(file)

    def load(self, file: Path) -> None:
        saved = torch.load(file)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.handle.load_state_dict(saved["algorithm"])

    def loss(self) -> float:
        inputs, targets = _batch(-1)
        with torch.no_grad():
            return float((self.model(inputs) - targets).square().mean())


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"after-{step}-steps-rank-{rank}.pt"


def _newest_step_of_all(folder: Path, steps: int) -> int:
    """Return the number of steps after which all ranks have a checkpoint."""
    rank = dist.get_rank()
    own = max((step for step in range(1, steps + 1) if _file(folder, step, rank).exists()), default=0)
    newest = torch.tensor([own])
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    return int(newest)


def main() -> None:
    """Train to the end, in as many lives as it takes."""
    folder, algorithm, is_disturbed = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "disturbed"
    if sys.argv[4] == "a host each":
        os.environ["BAGUA_HOST_ID"] = os.environ["RANK"]
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    dist.init_process_group("bagua", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    Path(folder, f"process-{os.getpid()}").touch()
    steps = STEPS_OF_ASYNC if algorithm == "async" else STEPS
    training = Training(algorithm)
    begin = _newest_step_of_all(folder, steps)
    if begin > 0:
        training.load(_file(folder, begin, rank))
    for step in range(begin, steps):
        training.step(step, is_disturbed and life == 1 and rank == 1 and step == steps // 2)
        training.save(_file(folder, step + 1, rank))
    if algorithm == "async":
        training.handle.abort()
    result = {"model": training.model.state_dict(), "loss": training.loss(), "life": life, "begin": begin}
    torch.save(result, folder / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
