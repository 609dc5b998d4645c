# SPDX-License-Identifier: Apache-2.0
"""Ranks that make different calls: an error on every rank that names both calls, and nothing is executed."""

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import (
    LAYOUTS,
    SLACK_SECONDS,
    TRANSPORTS,
    Outcome,
    cause_of,
    expect_error,
    new_world,
    selection,
    until_told,
    warm_up,
)

SIZE = 3
ODD_ONE = 1
Layouts = dict[str, RankPool]


def _coalesced(one: Callable[[Any], Any], *sizes: Any) -> Callable[[], Any]:
    def call() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
            for size in sizes:
                one(size)
        manager.wait()

    return call


def _sum_all(*sizes: int) -> Callable[[], Any]:
    return _coalesced(lambda size: dist.all_reduce(torch.ones(size)), *sizes)


def _gather_all(*sizes: int) -> Callable[[], Any]:
    return _coalesced(lambda size: dist.all_gather_into_tensor(torch.ones(size * SIZE), torch.ones(size)), *sizes)


def _gather_dtypes(*dtypes: torch.dtype) -> Callable[[], Any]:
    return _coalesced(
        lambda dtype: dist.all_gather_into_tensor(torch.ones(4 * SIZE, dtype=dtype), torch.ones(4, dtype=dtype)),
        *dtypes,
    )


def _sum(tensor: torch.Tensor) -> Callable[[], Any]:
    return lambda: dist.all_reduce(tensor)


def _scatter_from(root: int) -> Callable[[], Any]:
    return lambda: dist.scatter(torch.ones(4), _parts(4) if dist.get_rank() == root else None, src=root)


def _gather_objects() -> None:
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, 1)


def _parts(*sizes: int) -> list[torch.Tensor]:
    """Return a tensor per rank, of these sizes or all of one size."""
    return [torch.ones(size) for size in (sizes if len(sizes) > 1 else sizes * SIZE)]


# What one rank calls, what the others call, and how the error names the two.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "operations": (
        lambda: dist.broadcast(torch.ones(4), 0),
        _sum(torch.ones(4)),
        "bagua:broadcast #2 (Float[4], peer rank 0)",
        "bagua:all_reduce #2 (Float[4], sum)",
    ),
    "large sizes": (
        lambda: dist.all_reduce(torch.ones(3_000_000), dist.ReduceOp.MAX),
        _sum(torch.ones(1_000_000)),
        "(Float[3000000], max)",
        "(Float[1000000], sum)",
    ),
    "roots of scatter": (
        _scatter_from(1),
        _scatter_from(0),
        "bagua:scatter #2 (Float[4], peer rank 1)",
        "bagua:scatter #2 (Float[4], peer rank 0)",
    ),
    "one size of all_gather": (
        # This rank's own part is as the others expect it.
        lambda: dist.all_gather(_parts(4, 4, 9), torch.ones(4)),
        lambda: dist.all_gather(_parts(4), torch.ones(4)),
        "bagua:all_gather #2 (Float[4], 3 sizes: 4, 4, 9)",
        "bagua:all_gather #2 (Float[4])",
    ),
    "sizes of reduce_scatter": (
        lambda: dist.reduce_scatter(torch.ones(7), _parts(7)),
        lambda: dist.reduce_scatter(torch.ones(4), _parts(4)),
        "bagua:reduce_scatter #2 (Float[7], sum)",
        "bagua:reduce_scatter #2 (Float[4], sum)",
    ),
    "sizes of a list": (
        _sum_all(7, 5, 8),
        _sum_all(5, 7, 8),
        "bagua:all_reduce_coalesced #2 (Float[20], sum, 3 sizes: 7, 5, 8)",
        "bagua:all_reduce_coalesced #2 (Float[20], sum, 3 sizes: 5, 7, 8)",
    ),
    "dtypes of a list": (
        _gather_dtypes(torch.float32, torch.float64),
        _gather_dtypes(torch.float32, torch.float32),
        "#2 (Float[8], 2 sizes: 4 Float, 4 Double)",
        "#2 (Float[8], 2 x 4)",
    ),
    "lengths of a list": (
        _gather_all(6, 6),
        _gather_all(4, 4, 4),
        "#2 (Float[12], 2 x 6)",
        "#2 (Float[12], 3 x 4)",
    ),
    # With two ranks on one host and one on another, these would wait for each other in a circle.
    "all_gather against all_reduce": (
        lambda: dist.all_gather(_parts(4), torch.ones(4)),
        _sum(torch.ones(4)),
        "bagua:all_gather #2 (Float[4])",
        "bagua:all_reduce #2 (Float[4], sum)",
    ),
    "objects against a barrier": (
        _gather_objects,
        lambda: dist.barrier(),
        "#2 (Long[1])",
        "bagua:barrier #2",
    ),
    "coded values against others": (
        lambda: bagua.compressed.all_reduce(torch.ones(40)),
        _sum(torch.ones(40)),
        "bagua:compressed_all_reduce #2 (Float[40]",
        "bagua:all_reduce #2 (Float[40], sum)",
    ),
}


def _differ(case: str) -> tuple[Outcome, bool]:
    new_world()
    warm_up()
    odd, usual, _, _ = MISMATCHES[case]
    begun = time.monotonic()
    outcome = expect_error(until_told(odd if dist.get_rank() == ODD_ONE else usual))
    assert outcome.when - begun < SLACK_SECONDS
    # The ranks are out of step: later calls are refused and say why.
    later = expect_error(lambda: dist.all_reduce(torch.ones(2)))
    return outcome, "do not make the same call" in later.message


@pytest.mark.parametrize(
    ("case", "layout"),
    selection(
        itertools.product(MISMATCHES, LAYOUTS),
        [
            ("all_gather against all_reduce", "uneven-hosts"),
            ("objects against a barrier", "uneven-hosts"),
            ("coded values against others", "uneven-hosts"),
            ("operations", "in-host"),
            ("large sizes", "between-hosts"),
            ("sizes of a list", "in-host"),
            ("lengths of a list", "between-hosts"),
            ("roots of scatter", "between-hosts"),
            ("one size of all_gather", "in-host"),
            ("sizes of reduce_scatter", "between-hosts"),
        ],
    ),
)
def test_ranks_that_differ_are_all_told_both_calls(layouts: Layouts, case: str, layout: str) -> None:
    results = layouts[layout].run(_differ, case)
    _, _, odd, usual = MISMATCHES[case]
    cause = cause_of([outcome for outcome, _ in results])
    assert "do not make the same call" in cause
    assert odd in cause
    assert usual in cause
    assert f"rank {ODD_ONE}" in cause
    assert all(is_refused for _, is_refused in results)


CALLS_OF_NOTHING: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda numel: dist.all_reduce(torch.ones(numel)),
    "all_gather": lambda numel: dist.all_gather(_parts(numel), torch.ones(numel)),
    "compressed_all_reduce": lambda numel: bagua.compressed.all_reduce(torch.ones(numel)),
}


def _nothing_against_something(name: str) -> Outcome:
    new_world()
    warm_up()
    begun = time.monotonic()
    numel = 0 if dist.get_rank() == ODD_ONE else 4
    outcome = expect_error(until_told(lambda: CALLS_OF_NOTHING[name](numel)))
    assert outcome.when - begun < SLACK_SECONDS
    return outcome


@pytest.mark.parametrize(
    ("name", "layout"),
    selection(
        itertools.product(CALLS_OF_NOTHING, LAYOUTS),
        [
            *(("all_reduce", layout) for layout in LAYOUTS),
            ("all_gather", "between-hosts"),
            ("compressed_all_reduce", "between-hosts"),
        ],
    ),
)
def test_a_rank_that_has_nothing_to_exchange_is_found_out(layouts: Layouts, name: str, layout: str) -> None:
    cause = cause_of(layouts[layout].run(_nothing_against_something, name))
    assert "do not make the same call" in cause
    assert f"bagua:{name} #2 (Float[4]" in cause
    assert re.search(f"rank {ODD_ONE} .*bagua:{name} #2 \\(Float\\[0\\]", cause), cause


def _bucket_against_barrier(buckets_before: int) -> Outcome:
    new_world()
    warm_up()
    ddp = DDP(torch.nn.Linear(4, 1))
    handle = bagua.register_comm_hook(ddp, "bytegrad")
    for _ in range(buckets_before):
        ddp(torch.ones(2, 4)).sum().backward()
    assert handle.stats()["wire_bytes_between_hosts"] > 0
    output = ddp(torch.ones(2, 4)).sum()
    return expect_error(dist.barrier if dist.get_rank() == ODD_ONE else output.backward)


def test_a_bucket_does_not_miss_another_call(layouts: Layouts) -> None:
    numbers = []
    for buckets_before in (1, 2):
        cause = cause_of(layouts["between-hosts"].run(_bucket_against_barrier, buckets_before))
        assert "do not make the same call" in cause
        bucket, barrier = (re.search(f"bagua:{name} #(\\d+)", cause) for name in ("reduce_bucket", "barrier"))
        assert bucket is not None
        assert barrier is not None
        assert bucket[1] == barrier[1]
        numbers.append(int(bucket[1]))
    # In another channel each time: of an even number of channels they take turns.
    assert {number % 2 for number in numbers} == {0, 1}, numbers


def _all_to_all_with_wrong_splits() -> None:
    size = dist.get_world_size()
    sent = [2] * size
    if dist.get_rank() == ODD_ONE:
        sent[SIZE - 1] = 5
    dist.all_to_all_single(torch.zeros(2 * size), torch.ones(sum(sent)), [2] * size, sent)


def _all_to_all_of_wrong_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [torch.ones(5 if rank == ODD_ONE and peer == SIZE - 1 else 2) for peer in range(size)]
    dist.all_to_all([torch.zeros(2) for _ in range(size)], inputs)


def _gather_of_wrong_sizes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.zeros(2) for _ in range(size)] if rank == SIZE - 1 else None
    dist.gather(torch.ones(5 if rank == ODD_ONE else 2), outputs, dst=SIZE - 1)
    dist.barrier()


def _scatter_of_wrong_sizes() -> None:
    dist.scatter(torch.zeros(2), _parts(2, 2, 5) if dist.get_rank() == ODD_ONE else None, src=ODD_ONE)
    dist.barrier()


WRONG_PARTS = {
    "all_to_all_single": _all_to_all_with_wrong_splits,
    "all_to_all": _all_to_all_of_wrong_tensors,
    "gather": _gather_of_wrong_sizes,
    "scatter": _scatter_of_wrong_sizes,
}


def _exchange_wrong_parts(name: str) -> Outcome:
    new_world()
    warm_up()
    return expect_error(until_told(WRONG_PARTS[name]))


@pytest.mark.parametrize(
    ("name", "layout"),
    selection(
        itertools.product(WRONG_PARTS, LAYOUTS),
        [
            ("all_to_all_single", "between-hosts"),
            ("all_to_all", "in-host"),
            ("gather", "between-hosts"),
            ("scatter", "in-host"),
        ],
    ),
)
def test_parts_that_do_not_fit_are_refused_by_all_ranks(layouts: Layouts, name: str, layout: str) -> None:
    cause = cause_of(layouts[layout].run(_exchange_wrong_parts, name))
    assert f"rank {ODD_ONE} sends 5 elements to rank {SIZE - 1}, which expects 2" in cause
    assert f"bagua:{name} #2" in cause


def _nothing_is_executed() -> None:
    new_world()
    warm_up()
    tensor = torch.full((4,), float(dist.get_rank()))
    expect_error(lambda: dist.all_reduce(tensor) if dist.get_rank() else dist.broadcast(tensor, 0))
    assert tensor.tolist() == [float(dist.get_rank())] * 4


@pytest.mark.parametrize("layout", TRANSPORTS)
def test_tensors_of_a_mismatch_are_as_before(layouts: Layouts, layout: str) -> None:
    layouts[layout].run(_nothing_is_executed)


def _exchange_sizes_that_may_differ() -> None:
    new_world()
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.zeros(peer + 1) for peer in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    assert all(torch.equal(output, torch.full((peer + 1,), float(peer))) for peer, output in enumerate(outputs))
    received = torch.zeros(sum(range(1, size + 1)))
    sent = torch.full((size * (rank + 1),), float(rank))
    dist.all_to_all_single(received, sent, [peer + 1 for peer in range(size)], [rank + 1] * size)
    assert torch.equal(received, torch.cat([torch.full((peer + 1,), float(peer)) for peer in range(size)]))
    parts = [torch.zeros(peer + 1) for peer in range(size)] if rank == 0 else None
    dist.gather(torch.full((rank + 1,), float(rank)), parts)
    reduced = torch.zeros(rank + 1)
    dist.reduce_scatter(reduced, [torch.full((peer + 1,), 10.0 * peer + rank) for peer in range(size)])
    assert torch.equal(reduced, torch.full((rank + 1,), 10.0 * rank * size + sum(range(size))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_that_take_uneven_sizes_still_do(layouts: Layouts, layout: str) -> None:
    layouts[layout].run(_exchange_sizes_that_may_differ)
