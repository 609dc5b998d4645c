# SPDX-License-Identifier: Apache-2.0
"""A run that is saved and continued by new processes holds the same bits as one that was never interrupted."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from async_drift import let_rounds_come_in
from followed_training import take_step
from hooked_models import Leaves, emulated_hosts, perceptron, take_steps
from ranks import Pools, RankPool, on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

FLAT: dict[str, Any] = {"hierarchical": False}
SHIFT = {**FLAT, "peer_selection_mode": "shift_one"}
HALF, WHOLE = 10, 20


class Case(NamedTuple):
    algorithm: str
    options: dict[str, Any]
    qadam_warmup: int = 0
    size: int = 2
    hosts: str = ""
    half: int = HALF


# Odd halves where the number of exchanges so far decides about the next.
CASES = {
    "gradient_allreduce": Case("gradient_allreduce", {}, size=3),
    "gradient_allreduce_between_hosts": Case("gradient_allreduce", {}, size=4, hosts="ABAB"),
    "bytegrad": Case("bytegrad", FLAT, size=3),
    "bytegrad_between_hosts": Case("bytegrad", {}, size=3, hosts="AAB"),
    "decentralized": Case("decentralized", {}, size=3),
    "decentralized_every_third": Case("decentralized", {"communication_interval": 3}, half=11),
    "shift_one": Case("decentralized", SHIFT, size=4, half=11),
    "shift_one_every_third": Case("decentralized", {**SHIFT, "communication_interval": 3}, size=4),
    "low_precision": Case("low_precision_decentralized", FLAT, size=3),
    "low_precision_every_third": Case("low_precision_decentralized", {**FLAT, "communication_interval": 3}, half=11),
    "low_precision_between_hosts": Case("low_precision_decentralized", {}, size=3, hosts="AAB"),
    "qadam_switched_before": Case("qadam", FLAT, qadam_warmup=5, size=3),
    "qadam_switches_after": Case("qadam", FLAT, qadam_warmup=14, size=3),
    "qadam_switches_there": Case("qadam", FLAT, qadam_warmup=HALF),
    "qadam_switches_one_later": Case("qadam", FLAT, qadam_warmup=HALF + 1),
    "qadam_between_hosts": Case("qadam", {}, qadam_warmup=5, size=3, hosts="AAB"),
    "powersgd": Case("powersgd", {"start_step": 4, "rank": 2}, size=3),
    "powersgd_starts_there": Case("powersgd", {"start_step": HALF, "rank": 1}),
    "powersgd_without_warm_start": Case("powersgd", {"start_step": 0, "warm_start": False}),
    "powersgd_between_hosts": Case("powersgd", {"start_step": 4, "codec": "minmax_uint8"}, size=3, hosts="AAB"),
    "async_in_warm_up": Case("async", {"warmup_steps": 100}),
    "async_warm_up_ends_there": Case("async", {"warmup_steps": HALF, "sync_interval_ms": 10**9}),
    "async_after_its_round": Case("async", {"sync_interval_ms": 10**9}),
}


class Trained(NamedTuple):
    ddp: DDP
    optimizer: torch.optim.Optimizer
    handle: bagua.Handle


def _make(case: Case, group: dist.ProcessGroup) -> Trained:
    ddp = DDP(perceptron(), process_group=group, bucket_cap_mb=0.0001)  # several buckets
    optimizer: torch.optim.Optimizer
    if case.qadam_warmup:
        optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=case.qadam_warmup)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    handle = bagua.register_comm_hook(ddp, case.algorithm, optimizer=optimizer, **case.options)
    return Trained(ddp, optimizer, handle)


def _steps(trained: Trained, begin: int, end: int) -> None:
    for step in range(begin, end):
        take_step(trained.ddp, trained.optimizer, [sim.Batch(step)])
        if step in (0, HALF) and trained.handle.algorithm == "async":
            # The one round that the long interval allows, if it begins here, has come in before the next step.
            let_rounds_come_in()


def _state(trained: Trained) -> dict[str, Any]:
    return {
        "model": trained.ddp.module.state_dict(),
        "optimizer": trained.optimizer.state_dict(),
        "handle": trained.handle.state_dict(),
    }


def _file(folder: str) -> Path:
    return Path(folder, f"rank-{dist.get_rank()}.pt")


def _never_interrupted(case: Case) -> dict[str, Any]:
    with emulated_hosts(case.hosts or "h" * case.size) as group:
        trained = _make(case, group)
        _steps(trained, 0, WHOLE)
        return _state(trained)


def _save(case: Case, folder: str) -> int:
    with emulated_hosts(case.hosts or "h" * case.size) as group:
        trained = _make(case, group)
        _steps(trained, 0, case.half)
        torch.save(_state(trained), _file(folder))
    return os.getpid()


def _load(case: Case, folder: str, group: dist.ProcessGroup) -> Trained:
    trained = _make(case, group)
    saved = torch.load(_file(folder))  # with weights_only=True, its default
    trained.ddp.module.load_state_dict(saved["model"])
    trained.optimizer.load_state_dict(saved["optimizer"])
    trained.handle.load_state_dict(saved["handle"])
    return trained


def _load_and_save(case: Case, folder: str) -> None:
    with emulated_hosts(case.hosts or "h" * case.size) as group:
        torch.save(_state(_load(case, folder, group)), _file(folder))


def _load_and_go_on(case: Case, folder: str) -> tuple[int, dict[str, Any]]:
    with emulated_hosts(case.hosts or "h" * case.size) as group:
        trained = _load(case, folder, group)
        _steps(trained, case.half, WHOLE)
        return os.getpid(), _state(trained)


def _differences(one: Any, other: Any, name: str) -> list[str]:
    """The places at which two structures are not equal to the bit."""
    if type(one) is not type(other):
        return [f"{name}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [name]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{name}: {sorted(map(str, one))} and {sorted(map(str, other))}"]
        return [found for key in one for found in _differences(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{name}: {one} and {other}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for place, pair in pairs for found in _differences(*pair, f"{name}.{place}")]
    return [] if one == other else [f"{name}: {one} and {other}"]


def _assert_same(whole: dict[str, Any], continued: dict[str, Any], rank: int) -> None:
    for key in ("model", "optimizer"):
        assert not _differences(whole[key], continued[key], f"rank {rank}: {key}")
    assert whole["handle"]["step"] == continued["handle"]["step"] == WHOLE
    before, after = whole["handle"]["state"], continued["handle"]["state"]
    for state in (before, after):
        state.pop("milliseconds_to_round", None)  # of async: by the clock
    assert not _differences(before, after, f"rank {rank}: handle")


def _pools() -> Iterator[Pools]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(RankPool(size)) for size in (2, 3, 4)}


savers = pytest.fixture(scope="module", name="savers")(_pools)
loaders = pytest.fixture(scope="module", name="loaders")(_pools)


@pytest.mark.parametrize("name", CASES)
def test_going_on_from_a_checkpoint_gives_the_same_bits(
    rank_pools: Pools, savers: Pools, loaders: Pools, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    whole = rank_pools[case.size].run(_never_interrupted, case)
    saved = savers[case.size].run(_save, case, str(tmp_path))
    for rank, (loader, continued) in enumerate(loaders[case.size].run(_load_and_go_on, case, str(tmp_path))):
        assert loader not in saved
        _assert_same(whole[rank], continued, rank)


@pytest.mark.parametrize("name", ["bytegrad", "low_precision", "qadam_switched_before"])
def test_a_checkpoint_may_be_saved_again_before_the_next_step(
    rank_pools: Pools, savers: Pools, loaders: Pools, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    whole = rank_pools[case.size].run(_never_interrupted, case)
    savers[case.size].run(_save, case, str(tmp_path))
    loaders[case.size].run(_load_and_save, case, str(tmp_path))
    for rank, (_, continued) in enumerate(savers[case.size].run(_load_and_go_on, case, str(tmp_path))):
        _assert_same(whole[rank], continued, rank)


def _copied_state(case: Case) -> tuple[list[str], bool]:
    with emulated_hosts("h" * case.size) as group:
        trained = _make(case, group)
        _steps(trained, 0, 3)
        kept, other = trained.handle.state_dict(), trained.handle.state_dict()
        _steps(trained, 3, 6)
        later = trained.handle.state_dict()
        return _differences(kept, other, "state"), bool(_differences(kept["state"], later["state"], "state"))


@pytest.mark.parametrize("name", ["low_precision", "shift_one"])
def test_a_checkpoint_in_memory_does_not_change_as_training_goes_on(rank_pools: Pools, name: str) -> None:
    for changed, moved_on in rank_pools[CASES[name].size].run(_copied_state, CASES[name]):
        assert not changed
        assert moved_on


def _hooked(algorithm: str, lengths: tuple[int, ...] = (5, 3), **options: Any) -> Trained:
    ddp = DDP(Leaves(*lengths))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return Trained(ddp, optimizer, bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options))


@on_ranks(2)
def test_a_checkpoint_of_something_else_is_refused() -> None:
    saved = _hooked("low_precision_decentralized", **FLAT)
    saved.ddp([torch.ones(5), torch.ones(3)]).backward()
    saved.optimizer.step()
    state = saved.handle.state_dict()
    with pytest.raises(ValueError, match=r"low_precision_decentralized.*decentralized"):
        _hooked("decentralized", **FLAT).handle.load_state_dict(state)
    with pytest.raises(ValueError, match="communication_interval"):
        _hooked("low_precision_decentralized", communication_interval=2, **FLAT).handle.load_state_dict(state)
    with pytest.raises(ValueError, match=r"replica\.\w+\.0|layout|model|parameter"):
        _hooked("low_precision_decentralized", (5, 4), **FLAT).handle.load_state_dict(state)
    for missing in state["state"]:
        broken = {**state, "state": {name: value for name, value in state["state"].items() if name != missing}}
        with pytest.raises((KeyError, ValueError), match=missing):
            _hooked("low_precision_decentralized", **FLAT).handle.load_state_dict(broken)
    _hooked("low_precision_decentralized", **FLAT).handle.load_state_dict(state)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("quantized_allreduce", {"codec": "4bit", "exact": ()}), ("powersgd", {"start_step": 0, "rank": 1})],
    ids=["quantized_allreduce", "powersgd"],
)
@on_ranks(2)
def test_what_comm_hook_keeps_can_be_saved_and_is_loaded_with_the_first_bucket(
    algorithm: str, options: dict[str, Any]
) -> None:
    def begun() -> tuple[DDP, Any, torch.optim.Optimizer]:
        ddp = DDP(perceptron(), bucket_cap_mb=0.002)
        state, hook = bagua.comm_hook(algorithm, **FLAT, **options)
        ddp.register_comm_hook(state, hook)
        return ddp, state, torch.optim.SGD(ddp.parameters(), lr=0.1)

    ddp, state, optimizer = begun()
    assert "state" not in state.state_dict()
    take_steps(ddp, optimizer, range(4))
    saved = state.state_dict()
    assert saved["step"] == 4
    assert saved["state"]
    other, resumed, another = begun()
    other.load_state_dict(ddp.state_dict())
    resumed.load_state_dict(saved)
    fresh, _, third = begun()
    fresh.load_state_dict(ddp.state_dict())
    for one, its in ((ddp, optimizer), (other, another), (fresh, third)):
        take_steps(one, its, range(4, 8))
    whole, continued, without = ([p.detach() for p in one.parameters()] for one in (ddp, other, fresh))
    assert all(map(torch.equal, whole, continued))
    assert not all(map(torch.equal, whole, without)), "the state makes a difference"
    wrong, its_state, its_optimizer = begun()
    its_state.load_state_dict({**saved, "algorithm": "bytegrad"})
    with pytest.raises(ValueError, match="written with algorithm 'bytegrad'"):
        take_steps(wrong, its_optimizer, range(1))
    handle = bagua.register_comm_hook(DDP(perceptron()), algorithm, **FLAT, **options)
    with pytest.raises(ValueError, match="numbers parameters otherwise"):
        handle.load_state_dict(saved)
    with pytest.raises(ValueError, match="not of what comm_hook returned"):
        its_state.load_state_dict(handle.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))  # which makes the scale
    resumed.follow(scaler)
    before = [value for name, value in sorted(resumed.state_dict()["state"].items()) if value.is_floating_point()]
    scaler.update(4.0)
    after = [value for name, value in sorted(resumed.state_dict()["state"].items()) if value.is_floating_point()]
    assert any(bool((0.5 * one == two).all()) and bool(one.any()) for one, two in zip(before, after, strict=True))
    with pytest.raises(RuntimeError, match="needs no follow"):
        bagua.comm_hook("bytegrad")[0].follow(scaler)
