# SPDX-License-Identifier: Apache-2.0
"""One of two ranks, for test_address_translators.py: translated_rank.py RANK ADDRESS-OF-RANK-0

It does what each line of its input says, and prints how many seconds that took, or the error.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import bagua
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

STORE_PORT = 29400
TIMEOUT = timedelta(seconds=90)
SYNC_EVERY = 4


class _Rounds:
    """A training that exchanges its weights after every SYNC_EVERY steps, and nothing in between."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._ddp = DDP(torch.nn.Linear(200, 200))
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), 0.01)
        options = {"sync_every": SYNC_EVERY, "fragments": 1, "delay": 0}
        bagua.register_comm_hook(self._ddp, "diloco", optimizer=self._optimizer, **options)

    def run(self) -> None:
        for _ in range(SYNC_EVERY):
            self._optimizer.zero_grad()
            self._ddp(torch.randn(8, 200)).square().mean().backward()
            self._optimizer.step()
        weights = [p.detach().double().sum().item() for p in self._ddp.parameters()]
        everybody = [torch.empty(len(weights), dtype=torch.float64) for _ in range(2)]
        dist.all_gather(everybody, torch.tensor(weights, dtype=torch.float64))
        assert everybody[0].equal(everybody[1])


def _add(numel: int) -> None:
    tensor = torch.full((numel,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(3.0).all()


def _message() -> None:
    """Send from rank 0 to rank 1, which says nothing meanwhile."""
    tensor = torch.zeros(1_000)
    if dist.get_rank() == 0:
        dist.send(tensor.fill_(7.0), 1)
    else:
        dist.recv(tensor, 0)
        assert tensor.eq(7.0).all()


def main() -> None:
    rank, address = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    store = dist.TCPStore(address, STORE_PORT, 2, is_master=rank == 0, timeout=TIMEOUT)
    dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    rounds = None
    for line in sys.stdin:
        begun = time.monotonic()
        try:
            if line == "message\n":
                _message()
            elif line == "round\n":
                rounds = rounds or _Rounds()
                rounds.run()
            else:
                _add(int(line))
        except RuntimeError as error:
            print("error", str(error).replace("\n", " "), flush=True)
        else:
            print(time.monotonic() - begun, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
