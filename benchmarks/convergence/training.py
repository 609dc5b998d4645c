# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import bagua
import tasks
import torch
import torch.distributed as dist
from runs import SHARDED, TORCHS_POWER_SGD, Row, Run
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

BATCH_OF_LOSSES = 20  # steps that a point of the kept training loss is the mean of
PATIENCE = timedelta(minutes=20)  # the machine may have other things to do
# Where in the training the codecs are tried, in parts of its steps.
CODEC_TRIALS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
SMALL = 1024  # elements; below, quantized_allreduce codes nothing


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    if run.row.optimizer == "QAdam":
        return bagua.QAdamOptimizer(model.parameters(), lr=run.rate, warmup_steps=run.qadam_warmup)
    if run.row.optimizer == "Adam":
        return torch.optim.Adam(model.parameters(), lr=run.rate)
    if run.row.optimizer == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=run.rate)
    return torch.optim.SGD(model.parameters(), lr=run.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)


def register(run: Run, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> bagua.Handle | None:
    """Let the row's algorithm communicate for the model."""
    row = run.row
    if row.algorithm is None:
        return None
    if row.algorithm == TORCHS_POWER_SGD:
        state = powerSGD_hook.PowerSGDState(
            model.process_group,
            matrix_approximation_rank=row.options["rank"],
            start_powerSGD_iter=row.options["start_step"],
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return None
    return bagua.register_comm_hook(model, row.algorithm, optimizer=optimizer, **_as_recorded(row))


def shard(run: Run, network: nn.Module) -> bagua.Handle:
    """Shard the model over the ranks, a block at a time, and let the row's codecs communicate for it."""
    mesh = init_device_mesh("cpu", (run.ranks,))
    for layer in network.modules():
        if isinstance(layer, tasks.Block):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return bagua.fsdp.compress(network, **run.row.options)


def whole(run: Run, network: nn.Module) -> nn.Module:
    """Return the model with all of its weights on every rank."""
    if run.row.algorithm != SHARDED:
        return network
    complete = run.task.network()
    complete.load_state_dict(get_model_state_dict(network, options=StateDictOptions(full_state_dict=True)))
    return complete


def _as_recorded(row: Row) -> dict[str, Any]:
    """Return the row's options with what was the default when it was recorded first."""
    if row.as_given:
        return row.options
    if row.algorithm == "quantized_allreduce":
        return {**row.options, "codec": {"*": row.options["codec"]}, "exact": ("1d", "embedding", "small")}
    if row.algorithm == "diloco":
        return {"delay": 0, "outer_momentum": 0.9, **row.options}
    return row.options


# --- Errors of the codecs --------------------------------------------------------------------------------------------


def coded_gradients(network: nn.Module) -> Tensor:
    """Those that quantized_allreduce codes by few bits, in one tensor: no embeddings, biases, norms, small ones."""
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    own = [p for p in network.parameters() if p.dim() > 1 and p.numel() >= SMALL and id(p) not in embeddings]
    return torch.cat([p.grad.flatten() for p in own if p.grad is not None])


def codec_errors(loss: Callable[[], Tensor], model: DistributedDataParallel) -> dict[str, dict[str, float]]:
    """Squared error in parts of the squared norm, by codec: of a rank's gradient coded once, and of the ranks' mean."""
    with model.no_sync():
        loss().backward()  # type: ignore[no-untyped-call]
    own = coded_gradients(model.module)
    model.zero_grad()
    mean = mean_over_ranks(own)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    errors = {}
    for codec in bagua.available_codecs():
        decoded = torch.empty(ranks, own.numel())
        bagua.compressed.all_gather_into_tensor(decoded, own, codec=codec)
        coded_mean = own.clone()
        bagua.compressed.all_reduce(coded_mean, dist.ReduceOp.AVG, codec=codec)
        once = (decoded[rank] - own).double().square().sum() / own.double().square().sum()
        errors[codec] = {
            "gradient": float(mean_over_ranks(once)),
            "mean": float((coded_mean - mean).double().square().sum() / mean.double().square().sum()),
        }
    return errors


# --- Training --------------------------------------------------------------------------------------------------------


class Record:
    """What is noted while a run trains."""

    def __init__(self, run: Run, model: DistributedDataParallel, handle: bagua.Handle | None) -> None:
        self._run = run
        self._model = model
        self._handle = handle
        steps = run.task.steps
        self._trials = {round(part * (steps - 1)) for part in CODEC_TRIALS} if run.measures_codecs else set()
        self._bytes_half_way = 0
        self.losses: list[Tensor] = []
        self.half_way = flat(model)
        self.codecs: dict[int, dict[str, dict[str, float]]] = {}

    def before_step(self, loss: Callable[[], Tensor]) -> None:
        if len(self.losses) in self._trials:
            self.codecs[len(self.losses)] = codec_errors(loss, self._model)

    def after_step(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        if len(self.losses) == self._run.task.steps // 2:
            self.half_way = flat(self._model)
            self._bytes_half_way = self._bytes()

    def bytes_per_step(self) -> float | None:
        """Bytes that this rank sent per step in the second half of the training, when all warm-ups are over."""
        if self._handle is None:
            return None
        return (self._bytes() - self._bytes_half_way) / (self._run.task.steps - self._run.task.steps // 2)

    def mean_losses(self) -> list[float]:
        losses = mean_over_ranks(torch.stack(self.losses))
        whole = losses[: len(losses) // BATCH_OF_LOSSES * BATCH_OF_LOSSES]
        return [round(loss, 5) for loss in whole.view(-1, BATCH_OF_LOSSES).mean(1).tolist()]

    def _bytes(self) -> int:
        return 0 if self._handle is None else int(self._handle.stats()["wire_bytes"])


def flat(network: nn.Module) -> Tensor:
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in network.parameters()]
    return torch.cat([part.detach().flatten() for part in parts]).double()


def train(run: Run, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, record: Record) -> None:
    rank, ranks = dist.get_rank(), run.ranks
    torch.manual_seed(run.seed * ranks + rank)  # each rank mirrors other images
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, run.rate, total_steps=run.task.steps, pct_start=0.25, cycle_momentum=False
    )
    for batch in run.task.batches(run.seed, rank, ranks):
        record.before_step(lambda batch=batch: run.task.loss(model, batch))  # type: ignore[misc]
        loss = run.task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        record.after_step(loss)


def end_rounds(run: Run, handle: bagua.Handle | None) -> None:
    """Let the ranks have the same weights where they train apart between rounds."""
    if handle is not None and run.row.algorithm == "async":
        handle.abort()
    if handle is not None and run.row.algorithm in ("local_sgd", "diloco"):
        handle.synchronize()


def mean_over_ranks(values: Tensor) -> Tensor:
    mean = values.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@torch.no_grad()
def judge(run: Run, network: nn.Module) -> list[float]:
    """The task's qualities over all held-out data, of which each rank looks at a part."""
    network.eval()
    total = run.task.judge(network, dist.get_rank(), run.ranks)
    dist.all_reduce(total)
    return [float(value) for value in total[:-1] / total[-1]]


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
    if run.row.algorithm == SHARDED:
        os.environ["BAGUA_HOST_ID"] = f"host-{rank}"
    dist.init_process_group(
        "gloo" if run.row.algorithm == TORCHS_POWER_SGD else "bagua",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=run.ranks,
        timeout=PATIENCE,
    )
    torch.manual_seed(run.seed)
    network = run.task.network()
    buckets = {"bucket_cap_mb": run.row.options["bucket_cap_mb"]} if run.row.algorithm == TORCHS_POWER_SGD else {}
    model: nn.Module
    if run.row.algorithm == SHARDED:
        model, handle = network, shard(run, network)
        optimizer = make_optimizer(run, model)
    else:
        model = DistributedDataParallel(network, **buckets)
        optimizer = make_optimizer(run, model)
        handle = register(run, model, optimizer)
    record = Record(run, model, handle)
    start = time.perf_counter()
    train(run, model, optimizer, record)
    bytes_per_step = record.bytes_per_step()
    end_rounds(run, handle)
    seconds = time.perf_counter() - start
    losses = record.mean_losses()
    distance = {"half_way": distance_from_mean(record.half_way), "end": distance_from_mean(flat(network))}
    network = whole(run, network)
    average_over_ranks(network)
    result: dict[str, Any] = {
        "qualities": dict(zip(run.task.qualities, judge(run, network), strict=True)),
        "distance": distance,
        "parameters": sum(p.numel() for p in network.parameters()),
        "bytes_per_step": bytes_per_step,
        "rounds": None if handle is None else handle.stats()["rounds"],
        "seconds": round(seconds, 1),
        "losses": losses,
    }
    if record.codecs:
        result["codecs"] = record.codecs
    if rank == 0:
        output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
