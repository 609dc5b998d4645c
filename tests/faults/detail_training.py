# SPDX-License-Identifier: Apache-2.0
"""Run by torchrun with TORCH_DISTRIBUTED_DEBUG=DETAIL: every algorithm trains, then two ranks make different calls."""

import sys
from typing import Any

import bagua
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4


def _say(line: str) -> None:
    # In one piece: the ranks share their output, where print() may write the end of the line by itself.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _is_checked(group: dist.ProcessGroup) -> bool:
    return type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"


def _train(algorithm: str, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(model, process_group=group, bucket_cap_mb=0.001)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    if algorithm == "qadam":
        optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=2)
    # On a single host nothing is compressed by default.
    options: dict[str, Any] = {} if algorithm in ("gradient_allreduce", "async") else {"hierarchical": False}
    if algorithm in ("local_sgd", "diloco"):
        options["sync_every"] = 2
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
    for step in range(STEPS):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
    if algorithm == "async":
        handle.abort()
    stats = handle.stats()
    assert stats["rounds"] > 0
    if algorithm in ("gradient_allreduce", "bytegrad", "qadam", "async"):
        # These leave all ranks with the same weights, async at its abort().
        flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
        others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat, group=group)
        assert all(torch.equal(other, flat) for other in others)
    _say(f"trained {algorithm}")


def main() -> None:
    dist.init_process_group("bagua")
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    assert dist.group.WORLD is not None
    assert _is_checked(dist.group.WORLD)
    for algorithm in bagua.available_algorithms():
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        assert _is_checked(group)
        _train(algorithm, group)
        dist.destroy_process_group(group)
    try:
        dist.all_reduce(torch.ones(4 + dist.get_rank()))
    except RuntimeError as error:
        _say(f"mismatch on rank {dist.get_rank()}: {str(error).splitlines()[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
