# SPDX-License-Identifier: Apache-2.0
"""Many short runs of powersgd between emulated hosts and on one, with other buckets, dtypes and ranks each time.

torch's own hook crashes on Gloo in some runs of a hundred, for its collectives interleave. A run here fails if a rank
raises, hangs, or does not hold the same bits as the others.
"""

import random
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import emulated_hosts
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.long

RUNS, STEPS = 200, 8


def _train(seed: int, hosts: str) -> Tensor:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    widths = [chosen.randrange(5, 150) for _ in range(5)]
    layers: list[nn.Module] = []
    for inputs, outputs in zip([23, *widths], [*widths, 7], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    dtype = chosen.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    model = nn.Sequential(*layers).to(dtype)
    options: dict[str, Any] = {
        "rank": chosen.choice([1, 2, 4, 7]),
        "start_step": chosen.randrange(4),
        "error_feedback": chosen.random() < 0.8,
        "warm_start": chosen.random() < 0.8,
        "codec": chosen.choice(["", "", "minmax_uint8"]),
    }
    with emulated_hosts(hosts) as group:
        cap = chosen.choice([0.0001, 0.01, 25])
        ddp = DDP(model, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=chosen.random() < 0.5)
        bagua.register_comm_hook(ddp, "powersgd", **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = torch.randn(4, 23, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            ddp(inputs.to(dtype)).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()])


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_no_run_of_many_fails(size: int) -> None:
    with RankPool(size) as pool:
        for seed in range(size, RUNS, 4):
            hosts = random.Random(1000 + seed).choices("ABC", k=size)
            weights = pool.run(_train, seed, "".join(hosts) if seed % 3 else "h" * size)
            for own in weights:
                assert own.isfinite().all(), f"seed {seed}"
                assert torch.equal(own, weights[0]), f"seed {seed}"
