# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint (DCP): trains, saves and resumes; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_dcp.py FOLDER     (which all machines see)
"""

import io
import sys
from typing import Any

import bagua
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


class Training:
    """A model, its optimizer and the hook."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.handle = bagua.register_comm_hook(self.model, "quantized_allreduce", optimizer=self.optimizer)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(32, 64, generator=generator)
            loss = nn.functional.cross_entropy(self.model(x), x[:, :10].argmax(dim=1))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def states(self) -> dict[str, Any]:
        """Return what DCP saves, or what it writes into when it loads."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = io.BytesIO()
        torch.save(self.handle.state_dict(), state)
        # bagua: each rank's state is its own, under a name of its own, and in one piece whatever it holds.
        return {"model": model, "optimizer": optimizer, f"bagua.{dist.get_rank()}": state.getvalue()}

    def save(self, folder: str) -> None:
        """Write a checkpoint. Collective."""
        dcp.save(self.states(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        """Go on from a checkpoint. Collective."""
        states = self.states()
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        self.handle.load_state_dict(torch.load(io.BytesIO(states[f"bagua.{dist.get_rank()}"])))  # bagua


def main() -> None:
    """Compare an unbroken training with one that was resumed."""
    dist.init_process_group("bagua")
    whole = Training()
    whole.train(0, 10)
    whole.save(sys.argv[1])
    whole.train(10, 20)
    resumed = Training()
    resumed.load(sys.argv[1])
    resumed.train(10, 20)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    if dist.get_rank() == 0:
        print(f"resumed with the same bits: {all(torch.equal(one, other) for one, other in pairs)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
