# SPDX-License-Identifier: Apache-2.0
"""After an error: the survivors build a new group in the same process, and nothing of the old one is left."""

import copy
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from holdings import Holdings, holdings, left_behind, wait_for
from ranks import run_ranks
from script_ranks import run_script
from threads import bagua_threads
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import (
    SLACK_SECONDS,
    TRANSPORTS,
    VICTIM,
    die,
    expect_error,
    fail_without_the_victim,
    make_world,
    selection,
    store,
    warm_up,
)

SIZE = 3
SHARED_MEMORY = Path("/dev/shm")


def _segments() -> list[str]:
    return sorted(entry.name for entry in SHARED_MEMORY.glob("bagua-*"))


def _train(steps: int) -> list[float]:
    import bagua

    torch.manual_seed(dist.get_rank())
    ddp = DDP(torch.nn.Linear(8, 3))
    bagua.register_comm_hook(ddp, "bytegrad")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    weights: list[float] = next(iter(ddp.parameters())).detach().flatten().tolist()
    return weights


def _without_a_group() -> tuple[int, Holdings]:
    """Destroy the default group; return the rank that this one had, and what a process without one holds."""
    rank = dist.get_rank()
    _train(1)  # torch loads and starts what it keeps
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert wait_for(lambda: not bagua_threads())
    return rank, holdings()


def _die() -> None:
    if dist.get_rank() == VICTIM:
        die()
    expect_error(lambda: dist.all_reduce(torch.ones(5)))


def _stay_away() -> None:
    fail_without_the_victim(lambda: dist.all_reduce(torch.ones(300_000)))


def _differ() -> None:
    expect_error(lambda: dist.all_reduce(torch.ones(7 if dist.get_rank() == VICTIM else 5)))


TROUBLES = {"death": _die, "timeout": _stay_away, "mismatch": _differ}


def _survive(trouble: str) -> tuple[list[float], list[str]]:
    shared = store()
    rank, before = _without_a_group()
    make_world(shared, "troubled", rank, SIZE, 2.0 if trouble == "timeout" else 30.0)
    warm_up()
    others = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    dist.all_reduce(torch.ones(3), group=others[0])
    TROUBLES[trouble]()
    del others
    dist.destroy_process_group()
    if rank == VICTIM:
        return [], left_behind(before)
    make_world(shared, "after", rank, SIZE - 1)
    weights = _train(3)
    dist.destroy_process_group()
    return weights, left_behind(before)


@pytest.mark.parametrize(
    ("trouble", "transport"),
    selection(
        itertools.product(TROUBLES, TRANSPORTS),
        [("death", "in-host"), ("death", "between-hosts"), ("timeout", "between-hosts"), ("mismatch", "in-host")],
    ),
)
def test_survivors_train_on_in_a_new_group_and_nothing_of_the_old_one_is_left(trouble: str, transport: str) -> None:
    results = run_ranks(
        SIZE, _survive, trouble, env=TRANSPORTS[transport], dying={VICTIM} if trouble == "death" else ()
    )
    assert results[0][0] == results[1][0]
    for result in results:
        assert result is None or not result[1]


# What a model has of weights, so that a death meets its exchange at work: 12 MB.
LAYERS = [1024, 1024, 1024, 1024]
ROUNDS: dict[str, dict[str, Any]] = {
    "local_sgd": {"sync_every": 4},
    "diloco": {"sync_every": 4, "fragments": 2, "delay": 1},
    "diloco, 4bit": {"sync_every": 4, "fragments": 2, "delay": 1, "codec": "4bit", "hierarchical": False},
}


class _Trained(NamedTuple):
    ddp: DDP
    optimizer: torch.optim.Optimizer
    handle: Any

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.ddp(torch.randn(2, LAYERS[0], generator=generator)).square().mean().backward()
        self.optimizer.step()

    def state_dicts(self) -> list[Any]:
        return copy.deepcopy([part.state_dict() for part in self])


def _begin_rounds(name: str) -> _Trained:
    import bagua

    torch.manual_seed(3)
    pairs = itertools.pairwise(LAYERS)
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(inputs, outputs) for inputs, outputs in pairs)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    options = ROUNDS[name]
    handle = bagua.register_comm_hook(ddp, name.split(",")[0], optimizer=optimizer, **options)
    return _Trained(ddp, optimizer, handle)


def _lose_a_rank_in_rounds(name: str, dies_after: int) -> tuple[str, float, list[float]] | None:
    shared = store()
    rank, _ = _without_a_group()
    make_world(shared, "troubled", rank, SIZE)
    trained = _begin_rounds(name)
    saved: list[Any] = []

    def train() -> None:
        for step in range(1, 40):
            trained.step(step)
            if step % 4 == 0:
                saved[:] = trained.state_dicts()
            if step == dies_after and rank == VICTIM:
                shared.set("trouble", str(time.monotonic()))
                die(shared)
            if step == dies_after:
                shared.wait(["trouble"], timedelta(seconds=60))

    outcome = expect_error(train)
    seconds = outcome.when - float(shared.get("trouble"))
    dist.destroy_process_group()
    # The round at hand is lost, and no more.
    make_world(shared, "after", rank, SIZE - 1)
    continued = _begin_rounds(name)
    for part, state in zip(continued, saved, strict=True):
        part.load_state_dict(state)
    for step in range(40, 49):
        continued.step(step)
    continued.handle.synchronize()
    weights = [parameter.double().sum().item() for parameter in continued.ddp.parameters()]
    dist.destroy_process_group()
    return outcome.message, seconds, weights


# Rounds are over after steps 4 and 8; diloco takes a fragment after steps 5 and 7, and exchanges it beside the next.
@pytest.mark.parametrize(
    ("name", "dies_after"),
    selection(
        itertools.product(ROUNDS, [5, 6, 8]),
        [("local_sgd", 6), ("diloco", 6), ("diloco, 4bit", 5)],
    ),
)
def test_a_rank_that_dies_in_or_between_rounds_costs_a_round(name: str, dies_after: int) -> None:
    results = run_ranks(SIZE, _lose_a_rank_in_rounds, name, dies_after, dying={VICTIM}, group_timeout=60.0)
    survivors = [result for result in results if result is not None]
    assert len(survivors) == SIZE - 1
    for message, seconds, weights in survivors:
        assert f"rank {VICTIM}" in message, message
        assert seconds < 2.0 + SLACK_SECONDS, message
        assert weights == survivors[0][2]


def _make_and_drop_groups() -> list[str]:
    size = dist.get_world_size()
    before: Holdings | None = None
    for cycle in range(6):
        group: Any = dist.new_group(list(range(size)), timeout=timedelta(seconds=20))
        dist.all_reduce(torch.ones(10), group=group)
        # In one order or the other, with work in flight or without, once or twice.
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        if cycle % 2 == 0 and work is not None:
            work.wait()
        backend = group._get_backend(torch.device("cpu"))
        if cycle % 4 == 3:
            dist.barrier()
            backend.abort()
        dist.destroy_process_group(group)
        backend.shutdown()
        del group, work, backend
        gc.collect()
        dist.barrier()
        if cycle == 1:
            # That of the default group has as many threads as it will have.
            before = holdings()
    assert before is not None
    return left_behind(before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_leave_no_thread_file_port_or_segment_behind(transport: str) -> None:
    for left in run_ranks(2, _make_and_drop_groups, env=TRANSPORTS[transport]):
        assert not left


LEAVING = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
rank, how = int(os.environ["RANK"]), sys.argv[1]
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
dist.all_reduce(torch.ones(4))
print(os.getpid(), flush=True)
if how == "with work in flight":
    work = dist.all_reduce(torch.ones(1000), async_op=True)
else:
    dist.barrier()
if how == "with an exception":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("without destroying", 0), ("with work in flight", 0), ("with an exception", 7)]
)
def test_a_script_may_end_without_destroying_its_group(how: str, code: int, tmp_path: Path) -> None:
    ends = run_script(LEAVING, 2, tmp_path, how, codes=[code] * 2)
    own = tuple(f"bagua-{int(end.output)}-" for end in ends)  # nothing else is printed
    assert not [name for name in _segments() if name.startswith(own)]


def _gone(call: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        call()


def _end_groups_in_any_order(order: str) -> list[str]:
    shared = store()
    rank, before = _without_a_group()
    size = 2
    make_world(shared, "first", rank, size)
    groups: list[Any] = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(10), group=group)
    works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for group in groups]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    if order == "some before":
        dist.destroy_process_group(groups[1])
    # Torch takes all groups down with the default one.
    dist.destroy_process_group()
    for group in groups:
        _gone(lambda group=group: dist.all_reduce(torch.ones(10), group=group))  # type: ignore[misc]
        _gone(lambda group=group: dist.destroy_process_group(group))  # type: ignore[misc]
    for backend in backends:
        with pytest.raises(RuntimeError, match="has been shut down"):
            backend.allreduce([torch.ones(10)]).wait()
        backend.abort()
        backend.shutdown()
    # Their work had been submitted before, and was awaited.
    for work in works:
        assert work is not None
        work.wait()
    if order == "kept":
        # A new default group beside what is left of the former ones.
        make_world(shared, "second", rank, size)
        dist.all_reduce(torch.ones(10))
        dist.barrier()
        dist.destroy_process_group()
    del group, groups, backend, backends, work, works
    return left_behind(before)


@pytest.mark.parametrize(
    ("order", "transport"),
    selection(
        itertools.product(["default first", "some before", "kept"], TRANSPORTS),
        [("some before", "in-host"), ("kept", "between-hosts")],
    ),
)
def test_groups_may_end_in_any_order(order: str, transport: str) -> None:
    for left in run_ranks(2, _end_groups_in_any_order, order, env=TRANSPORTS[transport]):
        assert not left


CREATING = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
print("ready", flush=True)
for number in range(10_000):
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=group)
    dist.destroy_process_group(group)
"""


def _is_abandoned(segment: Path) -> bool:
    try:
        return time.time() - segment.stat().st_ctime >= 11
    except FileNotFoundError:
        return True  # taken away by ranks of another program


@pytest.mark.long
def test_ranks_killed_while_they_make_segments_leave_none(tmp_path: Path) -> None:
    """Whatever the moment: what is left loses its name when the next group is made."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CREATING, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    own = tuple(f"bagua-{rank.pid}-" for rank in ranks)
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    # In one of the moments in which a segment has a name: they are few.
    wait_for(lambda: any(name.startswith(own) for name in _segments()), 5.0)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate(timeout=60)
    left = [name for name in _segments() if name.startswith(own)]
    for name in left:
        # A name this young could be one that is being made: it counts as abandoned after ten seconds.
        wait_for(lambda path=SHARED_MEMORY / name: _is_abandoned(path), 15.0)
    run_ranks(2, warm_up)
    assert not [name for name in _segments() if name.startswith(own)]
