# SPDX-License-Identifier: Apache-2.0
"""What demo.py runs on each of its emulated hosts: steps with one algorithm and another, by turns.

In one process, step after step, so that whatever else the machine does slows all of them alike. A step's time does not
depend on what the images show: these are noise.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bagua
import torch
import torch.distributed as dist
from fashion_mnist import residual_network
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ALONE = "computing alone"


class Training:
    """A model with its optimizer, and the seconds of its steps."""

    def __init__(self, algorithm: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.exchanges = algorithm != ALONE
        self.model = DistributedDataParallel(residual_network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if self.exchanges:
            bagua.register_comm_hook(self.model, algorithm, optimizer=self.optimizer, **options)
        self.seconds: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        """All ranks begin and end it together."""
        dist.barrier()
        start = time.perf_counter()
        with nullcontext() if self.exchanges else self.model.no_sync():
            self.optimizer.zero_grad()
            cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=json.loads, required=True, help="algorithms and their options, as JSON")
    parser.add_argument("--steps", type=int, required=True, help="of each")
    parser.add_argument("--images", type=int, required=True, help="of a step, on each rank")
    parser.add_argument("--output", type=Path, required=True, help="where rank 0 writes the seconds of each step")
    args = parser.parse_args()
    dist.init_process_group(backend="bagua")
    trainings = {name: Training(name, options) for name, options in {**args.runs, ALONE: {}}.items()}
    images, labels = torch.randn(args.images, 1, 28, 28), torch.randint(10, (args.images,))
    for _ in range(args.steps):
        for training in trainings.values():
            training.step(images, labels)
    if dist.get_rank() == 0:
        args.output.write_text(json.dumps({name: training.seconds for name, training in trainings.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
