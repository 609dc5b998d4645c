# SPDX-License-Identifier: Apache-2.0
"""After `handle.remove()` the same DDP model takes another algorithm, which works as on a new model."""

import copy
from typing import Any

import bagua
import pytest
import torch
from hooked_models import SMALL_BUCKETS, perceptron, take_steps
from ranks import Pools, run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP

# What comes first, what comes then, and options of the latter.
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("bytegrad", "quantized_allreduce", {"hierarchical": False, "exact": ()}),
    ("gradient_allreduce", "powersgd", {"start_step": 1, "rank": 2}),
    ("powersgd", "bytegrad", {"hierarchical": False}),
    ("decentralized", "local_sgd", {"sync_every": 2}),
    ("local_sgd", "bytegrad", {"hierarchical": False}),
    ("async", "low_precision_decentralized", {"hierarchical": False}),
    ("diloco", "diloco", {"sync_every": 2, "fragments": 1, "delay": 0}),
    ("qadam", "qadam", {"hierarchical": False}),
]
# Enough for every weight to have seen a gradient: QAdamOptimizer divides by a variance of zero for ever.
WARMUP = 7
BEFORE = range(WARMUP + 1)
BETWEEN = range(WARMUP + 1, WARMUP + 2)
AFTER = range(WARMUP + 2, WARMUP + 7)


def _optimizer_for(ddp: DDP, names: tuple[str, ...]) -> torch.optim.Optimizer:
    if "qadam" in names:
        return bagua.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=WARMUP)
    return torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def _train(ddp: DDP, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    take_steps(ddp, optimizer, steps)
    return [p.detach().clone() for p in ddp.parameters()]


def _change(first: str, second: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    ddp = DDP(perceptron(), **SMALL_BUCKETS, **settings)
    optimizer = _optimizer_for(ddp, (first, second))
    removed = bagua.register_comm_hook(ddp, first, optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"already has a communication hook.*handle\.remove\(\) first"):
        bagua.register_comm_hook(ddp, second, optimizer=optimizer, **options)
    _train(ddp, optimizer, BEFORE)
    removed.remove()
    between = _train(ddp, optimizer, BETWEEN)
    state = copy.deepcopy(optimizer.state_dict())
    handle = bagua.register_comm_hook(ddp, second, optimizer=optimizer, **options)
    weights = _train(ddp, optimizer, AFTER)

    alone = DDP(perceptron(), **SMALL_BUCKETS, **settings)
    with torch.no_grad():
        for p, value in zip(alone.parameters(), between, strict=True):
            p.copy_(value)
    other = _optimizer_for(alone, (first, second))
    other.load_state_dict(state)
    reference = bagua.register_comm_hook(alone, second, optimizer=other, **options)
    reference.load_state_dict({**reference.state_dict(), "layout": handle.state_dict()["layout"]})
    assert all(weight.isfinite().all() for weight in weights)
    for one, expected in zip(weights, _train(alone, other, AFTER), strict=True):
        assert torch.equal(one, expected)
    assert (handle.algorithm, handle.options) == (second, reference.options)
    ours, theirs = handle.stats(), reference.stats()
    names = ("algorithm", "steps", "rounds", "logical_bytes", "wire_bytes", "state_bytes")
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}  # type: ignore[literal-required]
    assert ours["steps"] == len(AFTER)
    with pytest.raises(RuntimeError, match="has been removed"):
        removed.synchronize()
    handle.remove()
    reference.remove()
    handle = bagua.register_comm_hook(ddp, "gradient_allreduce")
    _train(ddp, optimizer, range(2))
    assert handle.stats()["steps"] == 2, "a third one may come, too"


@pytest.mark.parametrize(("first", "second", "options"), CHANGES, ids=[f"{one}-{two}" for one, two, _ in CHANGES])
def test_another_algorithm_has_its_effect(rank_pools: Pools, first: str, second: str, options: dict[str, Any]) -> None:
    rank_pools[2].run(_change, first, second, options, {}, timeout=60.0)


@pytest.mark.parametrize("mode", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_another_algorithm_works_in_every_mode_of_ddp(rank_pools: Pools, mode: str) -> None:
    for change in (CHANGES[0], CHANGES[3]):
        rank_pools[2].run(_change, *change, {mode: True}, timeout=60.0)


def _small_buckets() -> list[list[int]]:
    """Return the buckets of a model of 10 MB, whose first algorithm is at work in the background, with the second."""
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(700, 700, bias=False) for _ in range(5))))
    optimizer = _optimizer_for(ddp, ())
    removed = bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer)
    data = torch.ones(2, 700)
    for _ in range(3):
        ddp(data).sum().backward()
        optimizer.step()
    removed.remove()
    handle = bagua.register_comm_hook(ddp, "bytegrad")
    for _ in range(2):
        ddp(data).sum().backward()
        optimizer.step()
    layout: list[list[int]] = handle.state_dict()["layout"]
    return layout


def test_buckets_become_small_where_the_second_algorithm_wants_it() -> None:
    # DDP's own are the last layer, and the others. Two layers are as many as a small bucket may hold.
    assert run_ranks(2, _small_buckets, env={"BAGUA_HOST_ID": ["a", "b"]}) == [[[4], [3, 2], [1, 0]]] * 2
