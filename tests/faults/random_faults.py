# SPDX-License-Identifier: Apache-2.0
"""One rank that works until something goes wrong, on itself or elsewhere: the inside of test_random_faults.py."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import bagua
import torch
import torch.distributed as dist
from bagua._native import _C
from holdings import wait_for
from hooked_models import optimizer_for
from threads import bagua_threads
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import file_under, meet, nobody_writes, store, warm_up

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
    seed: int
    moment: float  # seconds of work before the fault


# Steps before trouble: until buckets have been rebuilt and every algorithm has left its warm-up.
FIRST_STEPS = 5


class Report(NamedTuple):
    """What a rank saw."""

    error: str
    seconds: float  # after the fault
    threads: list[str]
    processes: tuple[int, int]  # its own, and that of the victim


class InjectedError(Exception):
    """Raised on purpose."""


def _collective(name: str, generator: random.Random) -> Callable[[], Any]:
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
    options: dict[str, Any] = {"warmup_steps": 2, "sync_interval_ms": 1} if algorithm == "async" else {}
    if "hierarchical" in _C.check_options(algorithm, {}):
        options["hierarchical"] = is_hierarchical
    return options


def _training(algorithm: str, is_hierarchical: bool, checkpoint: Callable[[], None]) -> Callable[[], Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(200, 200) for _ in range(4)]
    ddp = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
    # In the middle of the backward, on the thread of autograd.
    layers[2].register_full_backward_hook(lambda *_: checkpoint())
    optimizer = optimizer_for(algorithm, ddp, warmup=3, lr=0.01)
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


def run(plan: Plan) -> Report:
    """Work until an error, and report it; one of the ranks gets into trouble when all have worked for a moment."""
    shared, rank = store(), dist.get_rank()
    # On both channels, which then have their segment: its name may stay where the rank that makes it is stopped, and
    # killed when nobody is left.
    warm_up()
    is_due = threading.Event()

    def checkpoint() -> None:
        if is_due.is_set() and plan.fault == "hang":
            time.sleep(3600)
        if is_due.is_set():
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
    if rank == plan.victim:
        shared.set("victim", str(os.getpid()))
    meet(shared, "work", plan.size)
    victim = int(shared.get("victim"))

    def make_trouble() -> None:
        shared.set("trouble", str(time.monotonic()))
        if plan.fault in ("hang", "raise"):
            is_due.set()
        else:
            with nobody_writes(file_under(shared).path):
                os.kill(victim, signal.SIGKILL if plan.fault == "kill" else signal.SIGSTOP)

    # A rank cannot stop itself without what it holds.
    if rank == (plan.victim + (plan.fault in ("kill", "stop"))) % plan.size:
        threading.Timer(plan.moment, make_trouble).start()
    try:
        while True:
            work()
            if not is_in_backward:
                checkpoint()
    except (InjectedError, RuntimeError) as error:
        message, seconds = str(error), time.monotonic() - float(shared.get("trouble"))
    dist.destroy_process_group()
    wait_for(lambda: not bagua_threads(), 5.0)
    if plan.fault in ("stop", "hang") and shared.add("over", 1) == plan.size - 1:
        os.kill(victim, signal.SIGKILL)
    return Report(message, seconds, bagua_threads(), (os.getpid(), victim))
