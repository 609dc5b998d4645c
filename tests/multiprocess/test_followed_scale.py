# SPDX-License-Identifier: Apache-2.0
"""The loss scale of an optimizer that accelerate has wrapped is followed without a call of the user's."""

from types import SimpleNamespace
from typing import Any

import bagua
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@on_ranks(2)
def test_the_residuals_follow_the_scale() -> None:
    ddp = DDP(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    # As accelerate's AcceleratedOptimizer is made.
    wrapped: Any = SimpleNamespace(optimizer=optimizer, scaler=scaler)
    options: dict[str, Any] = {"hierarchical": False, "codec": {"*": "4bit"}, "exact": ()}
    handle = bagua.register_comm_hook(ddp, "quantized_allreduce", optimizer=wrapped, **options)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    scaler.scale(ddp(x).square().mean()).backward()
    before = handle.state_dict()["state"]
    scaler.step(optimizer)
    scaler.update(2.0)
    after = handle.state_dict()["state"]
    assert before["sender.4bit.0"].abs().max() > 0
    for name, values in before.items():
        if values.is_floating_point():
            assert torch.equal(after[name], values / 4), name
