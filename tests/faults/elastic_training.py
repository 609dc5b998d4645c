# SPDX-License-Identifier: Apache-2.0
"""Run by torchrun: trains with a checkpoint after every step; in its first life one rank is killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import bagua
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 8
KILLED_IN_STEP = 4


class DeadlyStep(torch.autograd.Function):
    """Ends its process in the middle of a backward."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, algorithm, is_disturbed = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "disturbed"
    dist.init_process_group("bagua", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    ddp = DDP(model, bucket_cap_mb=0.001)
    handle = bagua.register_comm_hook(ddp, algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    checkpoint = folder / "checkpoint.pt"
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        begin = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["algorithm"])
    for step in range(begin, STEPS):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        output = ddp(data)
        if is_disturbed and first_life and rank == 1 and step == KILLED_IN_STEP:
            output = DeadlyStep.apply(output)
        output.square().mean().backward()
        optimizer.step()
        state = {
            "step": step + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "algorithm": handle.state_dict(),
        }
        if rank == 0:
            torch.save(state, folder / "next.pt")
            os.replace(folder / "next.pt", checkpoint)
    if rank == 0:
        Path(folder, "lives.txt").write_text(str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
