# SPDX-License-Identifier: Apache-2.0
"""A minute's proof that an installation works: 2 ranks, one allreduce, three steps of DDP with 8-bit gradients.

Run it with the Python that bagua is installed for: `python tests/smoke.py`. It never imports bagua before the process
group exists, so it also shows that torch finds the backend by itself.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"rank {dist.get_rank()}: {what}")


def _run(rank: int, store: str) -> None:
    dist.init_process_group("bagua", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    _check("bagua" in sys.modules, "the backend was not loaded through its entry point")

    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total)
    _check(bool((total == 3).all()), f"allreduce gave {total[0]} instead of 3")

    import bagua

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(256, 64))
    handle = bagua.register_comm_hook(model, "bytegrad", hierarchical=False)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model.zero_grad()
        model(torch.randn(16, 256)).square().mean().backward()
        gradient = model.module.weight.grad
        _check(gradient is not None, "no gradient")
        gathered = [torch.empty_like(gradient) for _ in range(WORLD_SIZE)]
        dist.all_gather(gathered, gradient)
        _check(torch.equal(gathered[0], gathered[1]), "ranks hold different gradients")
    stats = handle.stats()
    _check(0 < stats["wire_bytes"] < stats["logical_bytes"] / 2, f"nothing was compressed: {stats}")
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, args=(os.path.join(folder, "store"),), nprocs=WORLD_SIZE)
    print(f"smoke test passed: torch {torch.__version__}, {WORLD_SIZE} ranks")


if __name__ == "__main__":
    main()
