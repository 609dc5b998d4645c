# SPDX-License-Identifier: Apache-2.0
"""One rank that works until something goes wrong, on itself or elsewhere: the inside of test_random_faults.py."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from threads import bagua_threads

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "ring of messages",
    "barrier",
)
FAULTS = ("kill", "stop", "hang", "raise")
ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async")


class Plan(NamedTuple):
    """What a round does; the same on all its ranks."""

    size: int
    workload: str  # one of the above, or "mixed collectives"
    victim: int
    fault: str  # one of FAULTS
    ranks_per_host: int
    shares_memory: bool  # where ranks share a host
    is_hierarchical: bool  # where the algorithm lets us choose
    is_in_backward: bool  # where training hangs or raises; else between two steps
    timeout: float
    folder: str
    seed: int


# Starting ranks, and building their groups, on a busy machine.
START_SECONDS = 90.0
# Steps before trouble: until buckets have been rebuilt and every algorithm has left its warm-up.
FIRST_STEPS = 5


class Report(NamedTuple):
    """What a rank saw."""

    error: str
    when: float  # on the clock that all processes share
    threads: tuple[str, ...]


class InjectedError(Exception):
    """Raised on purpose."""


def _collective(name: str, generator: random.Random) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    numel = size * generator.choice((1, 50, 5_000, 500_000))
    tensor = torch.ones(numel)
    if name == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    if name == "broadcast":
        root = generator.randrange(size)
        return lambda: (dist.broadcast(tensor, root), dist.broadcast(tensor, (root + 1) % size))
    if name == "all_gather_into_tensor":
        return lambda: dist.all_gather_into_tensor(torch.empty(numel * size), tensor)
    if name == "reduce_scatter_tensor":
        return lambda: dist.reduce_scatter_tensor(torch.empty(numel // size), tensor)
    if name == "all_to_all_single":
        return lambda: dist.all_to_all_single(torch.empty(numel), tensor)
    if name == "barrier":
        return lambda: dist.barrier()

    def ring() -> None:
        received = torch.empty(numel)
        sent = dist.isend(tensor, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert sent is not None
        sent.wait()

    return ring


def _options(algorithm: str, is_hierarchical: bool) -> dict[str, Any]:
    from bagua._native import _C

    options: dict[str, Any] = {"warmup_steps": 2, "sync_interval_ms": 1} if algorithm == "async" else {}
    if "hierarchical" in _C.check_options(algorithm, {}):
        options["hierarchical"] = is_hierarchical
    return options


def _training(algorithm: str, is_hierarchical: bool, checkpoint: Callable[[], None]) -> Callable[[], Any]:
    import bagua
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    layers = [torch.nn.Linear(200, 200) for _ in range(4)]
    ddp = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
    # In the middle of the backward, on the thread of autograd.
    layers[2].register_full_backward_hook(lambda *_: checkpoint())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    if algorithm == "qadam":
        optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=0.01, warmup_steps=3)
    bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **_options(algorithm, is_hierarchical))

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()

    return step


def workload(
    name: str, seed: int = 0, *, is_hierarchical: bool = True, checkpoint: Callable[[], None] = lambda: None
) -> Callable[[], Any]:
    """Return one step of the work, for as many as are wanted; training calls `checkpoint` in the backward."""
    if name in ALGORITHMS:
        return _training(name, is_hierarchical, checkpoint)
    generator = random.Random(seed)

    def one() -> None:
        _collective(generator.choice(COLLECTIVES) if name == "mixed collectives" else name, generator)()

    return one


def run(rank: int, plan: Plan, connection: Connection) -> None:
    """Work until an error, and report it; the victim of a "hang" or a "raise" gets into trouble when it is told to."""
    os.environ.update(
        RANK=str(rank),
        BAGUA_SHARED_MEMORY="1" if plan.shares_memory else "0",
        BAGUA_HOST_ID=f"host-{rank // plan.ranks_per_host}",
    )
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(plan.folder, "trace_"))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(plan.folder, "store")), plan.size)  # type: ignore[attr-defined]
    # On a busy machine ranks start at different times: not what the timeout is to measure.
    store.set(f"started {rank}", "")
    store.wait([f"started {peer}" for peer in range(plan.size)], timedelta(seconds=START_SECONDS))
    dist.init_process_group(
        "bagua", store=store, rank=rank, world_size=plan.size, timeout=timedelta(seconds=plan.timeout)
    )

    # On both channels, which then have their segment: its name may stay where the rank that makes it is stopped, and
    # killed when nobody is left.
    for _ in range(2):
        dist.all_reduce(torch.ones(1))

    def checkpoint() -> None:
        if not connection.poll():
            return
        if connection.recv() == "hang":
            time.sleep(3600)
        raise InjectedError("on purpose")

    is_in_backward = plan.is_in_backward and plan.workload in ALGORITHMS
    work = workload(
        plan.workload,
        plan.seed,
        is_hierarchical=plan.is_hierarchical,
        checkpoint=checkpoint if is_in_backward else lambda: None,
    )
    for _ in range(FIRST_STEPS if plan.workload in ALGORITHMS else 1):
        work()
    connection.send("working")
    try:
        while True:
            work()
            if not is_in_backward:
                checkpoint()
    except InjectedError as error:
        report = Report(repr(error), time.monotonic(), ())
    except RuntimeError as error:
        report = Report(str(error), time.monotonic(), ())
    dist.destroy_process_group()
    end = time.monotonic() + 5.0
    while tuple(bagua_threads()) and time.monotonic() < end:
        time.sleep(0.05)
    connection.send(report._replace(threads=tuple(bagua_threads())))
