# SPDX-License-Identifier: Apache-2.0
"""What a user may type, and what mypy is to find wrong with it: checked by test_types.py, never run."""

from __future__ import annotations

from typing import Any

import bagua
import bagua.torch_api as original
import torch
import torch.distributed as dist
from bagua.lightning import BaguaStatsCallback, BaguaStrategy
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("bagua", pg_options=bagua.Options(is_high_priority_stream=True))
names: list[str] = bagua.available_algorithms()
codecs: list[str] = bagua.available_codecs()
network = nn.Linear(4, 4)
model = DistributedDataParallel(network)

summary_writer: Any = None
handle: bagua.Handle = bagua.register_comm_hook(model, "bytegrad", hierarchical=False)
handle.load_state_dict(handle.state_dict())
stats: bagua.Stats = handle.stats()
sent: int = stats["wire_bytes"]
handle.log_to(summary_writer, step=3)
handle.reset()
with handle as same_handle:
    same_handle.abort()
handle.abort()
handle.resume()
handle.remove()
options: dict[str, bool | int | float | str | None] = handle.options

optimizer = bagua.QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=100)
bagua.register_comm_hook(model, "qadam", optimizer)
bagua.register_comm_hook(model, "decentralized", torch.optim.SGD(model.parameters(), lr=0.1), dist.group.WORLD)
bagua.register_comm_hook(model, "diloco", torch.optim.SGD(model.parameters(), lr=0.1), sync_every=30, delay="auto")
state, hook = bagua.comm_hook("bytegrad")
model.register_comm_hook(state, hook)

strategy = BaguaStrategy("async", sync_interval_ms=100, find_unused_parameters=False)
trainer = Trainer(strategy=strategy, callbacks=[BaguaStatsCallback()])
at_work: bagua.Handle | None = strategy.handle

original.allreduce(torch.ones(2), torch.zeros(2), original.ReduceOp.SUM)
original.broadcast(torch.ones(2), root=0)
rank: int = original.get_rank()

# Each of these has to be found: an ignore that is not needed is an error here.
bagua.register_comm_hook(model, 8)  # type: ignore[call-overload]
bagua.register_comm_hook(network, "bytegrad")  # type: ignore[call-overload]
bagua.register_comm_hook(model, "bytegrad", hierarchical=b"no")  # type: ignore[arg-type]
bagua.register_comm_hok(model, "bytegrad")  # type: ignore[attr-defined]
bagua.Options(high_priority=True)  # type: ignore[call-arg]
bagua.QAdamOptimizer(model.parameters(), warmup_steps="many")  # type: ignore[arg-type]
handle.stat()  # type: ignore[attr-defined]
count: int = handle.algorithm  # type: ignore[assignment]
