# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import bagua
import torch
import torch.distributed as dist
from plan import Run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    if run.row.optimizer == "QAdam":
        return bagua.QAdamOptimizer(model.parameters(), lr=run.rate, warmup_steps=run.qadam_warmup)
    if run.row.optimizer == "Adam":
        return torch.optim.Adam(model.parameters(), lr=run.rate)
    return torch.optim.SGD(model.parameters(), lr=run.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)


def flat(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()]).double()


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], Tensor]:
    """Return this rank's loss of every step, and its weights after half of them."""
    rank, ranks = dist.get_rank(), run.ranks
    torch.manual_seed(run.seed * ranks + rank)  # each rank mirrors other images
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, run.rate, total_steps=run.task.steps, pct_start=0.25, cycle_momentum=False
    )
    losses: list[Tensor] = []
    half_way = flat(model)
    for batch in run.task.batches(run.seed, rank, ranks):
        loss = run.task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if len(losses) == run.task.steps // 2:
            half_way = flat(model)
    return torch.stack(losses).tolist(), half_way


def mean_over_ranks(values: Tensor) -> Tensor:
    mean = values.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@torch.no_grad()
def judge(run: Run, network: nn.Module) -> float:
    """The quality over all held-out data, of which each rank looks at a part."""
    network.eval()
    total = run.task.judge(network, dist.get_rank(), run.ranks)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def distance_from_mean(weights: Tensor) -> float:
    """How far the farthest rank's weights are from the mean of all, in parts of the mean's length."""
    mean = mean_over_ranks(weights)
    distance = (weights - mean).norm() / mean.norm()
    dist.all_reduce(distance, op=dist.ReduceOp.MAX)
    return float(distance)


@torch.no_grad()
def average_over_ranks(network: nn.Module) -> None:
    """Make weights and running statistics the mean of those of all ranks."""
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(mean_over_ranks(tensor.double()))


def run_rank(rank: int, run: Run, rendezvous: Path, output: Path) -> None:
    """Train, judge, and let rank 0 write the result."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "bagua",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=run.ranks,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(run.seed)
    network = run.task.network()
    model = DistributedDataParallel(network)
    optimizer = make_optimizer(run, model)
    handle = None
    if run.row.algorithm is not None:
        handle = bagua.register_comm_hook(model, run.row.algorithm, optimizer=optimizer, **run.row.options)
    start = time.perf_counter()
    losses, half_way = train(run, model, optimizer)
    if handle is not None and run.row.algorithm == "async":
        handle.abort()
    seconds = time.perf_counter() - start
    mean_losses = mean_over_ranks(torch.tensor(losses)).tolist()
    own_quality = judge(run, network)
    distance = {"half_way": distance_from_mean(half_way), "end": distance_from_mean(flat(network))}
    average_over_ranks(network)
    result = {
        "quality": judge(run, network),
        "own_quality": own_quality,
        "distance": distance,
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": seconds,
        "stats": None if handle is None else handle.stats(),
        "losses": [round(loss, 5) for loss in mean_losses],
    }
    if rank == 0:
        output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
