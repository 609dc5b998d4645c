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
from hooked_models import SMALL_BUCKETS, Leaves, emulated_hosts, perceptron, same, take_steps
from hooked_trainings import Trained
from ranks import Pools, RankPool, on_ranks
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
    is_saved_again: bool = False  # before the first step that follows


# With shift_one the number of exchanges so far, here an odd one, decides about the next.
CASES = {
    "gradient_allreduce": Case("gradient_allreduce", {}, size=4, hosts="ABAB"),
    "bytegrad": Case("bytegrad", FLAT, size=3, is_saved_again=True),
    "bytegrad_between_hosts": Case("bytegrad", {}, size=3, hosts="AAB"),
    "decentralized_every_third": Case("decentralized", {"communication_interval": 3}, half=11),
    "shift_one": Case("decentralized", SHIFT, size=4, half=11),
    "low_precision": Case("low_precision_decentralized", FLAT, size=3, is_saved_again=True),
    "low_precision_every_third": Case("low_precision_decentralized", {**FLAT, "communication_interval": 3}, half=11),
    "low_precision_between_hosts": Case("low_precision_decentralized", {}, size=3, hosts="AAB"),
    "qadam_switched_before": Case("qadam", FLAT, qadam_warmup=5, size=3, is_saved_again=True),
    "qadam_switches_there": Case("qadam", FLAT, qadam_warmup=HALF),
    "qadam_switches_one_later": Case("qadam", FLAT, qadam_warmup=HALF + 1),
    "qadam_between_hosts": Case("qadam", {}, qadam_warmup=5, size=3, hosts="AAB"),
    "powersgd_starts_there": Case("powersgd", {"start_step": HALF, "rank": 1}),
    "powersgd_without_warm_start": Case("powersgd", {"start_step": 0, "warm_start": False}),
    "powersgd_between_hosts": Case("powersgd", {"start_step": 4, "codec": "minmax_uint8"}, size=3, hosts="AAB"),
    "async_warm_up_ends_there": Case("async", {"warmup_steps": HALF, "sync_interval_ms": 10**9}),
    "async_after_its_round": Case("async", {"sync_interval_ms": 10**9}),
}


def _make(case: Case, group: dist.ProcessGroup) -> Trained:
    ddp = DDP(perceptron(), process_group=group, **SMALL_BUCKETS)
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


def _train(case: Case, begin: int, end: int, folder: str) -> tuple[int, dict[str, Any]]:
    """Go on from a checkpoint unless `begin` is 0, and leave one; the process, and what the checkpoint holds."""
    file = Path(folder, f"rank-{dist.get_rank()}.pt")
    with emulated_hosts(case.hosts or "h" * case.size) as group:
        trained = _make(case, group)
        parts: dict[str, Any] = {"model": trained.ddp.module, "optimizer": trained.optimizer, "handle": trained.handle}
        if begin > 0:
            saved = torch.load(file)  # with weights_only=True, its default
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        _steps(trained, begin, end)
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state, file)
        return os.getpid(), state


def _assert_same(whole: dict[str, Any], continued: dict[str, Any]) -> None:
    assert whole["handle"]["step"] == continued["handle"]["step"] == WHOLE
    before, after = whole["handle"]["state"], continued["handle"]["state"]
    for state in (before, after):
        state.pop("milliseconds_to_round", None)  # of async: by the clock
    for one, other in [(whole["model"], continued["model"]), (before, after)]:
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # which says where they differ
    assert same(whole["optimizer"], continued["optimizer"])


@pytest.fixture(scope="module")
def new_pools() -> Iterator[Pools]:
    """Ranks that are other processes than those of rank_pools."""
    with ExitStack() as stack:
        yield {size: stack.enter_context(RankPool(size)) for size in (2, 3, 4)}


@pytest.mark.parametrize("name", CASES)
def test_going_on_from_a_checkpoint_gives_the_same_bits(
    rank_pools: Pools, new_pools: Pools, tmp_path: Path, name: str
) -> None:
    case, folder = CASES[name], str(tmp_path)
    whole = rank_pools[case.size].run(_train, case, 0, WHOLE, folder)
    rank_pools[case.size].run(_train, case, 0, case.half, folder)
    if case.is_saved_again:
        new_pools[case.size].run(_train, case, case.half, case.half, folder)
    continued = new_pools[case.size].run(_train, case, case.half, WHOLE, folder)
    for (process, expected), (another, state) in zip(whole, continued, strict=True):
        assert process != another
        _assert_same(expected, state)


def _copied_state(case: Case) -> tuple[bool, bool]:
    """Whether a checkpoint is the same after three more steps as one made with it, and as one made after them."""
    with emulated_hosts("h" * case.size) as group:
        trained = _make(case, group)
        _steps(trained, 0, 3)
        kept, other = trained.handle.state_dict(), trained.handle.state_dict()
        _steps(trained, 3, 6)
        later = trained.handle.state_dict()
        return same(kept, other), same(kept["state"], later["state"])


@pytest.mark.parametrize("name", ["low_precision", "shift_one"])
def test_a_checkpoint_in_memory_does_not_change_as_training_goes_on(rank_pools: Pools, name: str) -> None:
    assert rank_pools[CASES[name].size].run(_copied_state, CASES[name]) == [(True, False)] * CASES[name].size


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
    trained = _hooked("low_precision_decentralized", **FLAT)
    trained.handle.load_state_dict(state)
    weights = {name: weight.clone() for name, weight in trained.ddp.module.state_dict().items()}
    moved = {"module": {name: weight + 1 for name, weight in weights.items()}, "optimizer": {}}
    for other in ({}, moved):
        of_bytegrad = {"handle": _hooked("bytegrad", **FLAT).handle.state_dict(), **other}
        with pytest.raises(ValueError, match="written with algorithm 'bytegrad'"):
            trained.handle.of_all_ranks().load_state_dict({"ranks": [of_bytegrad] * 2})
        assert same(trained.ddp.module.state_dict(), weights)


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
