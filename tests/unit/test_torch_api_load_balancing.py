# SPDX-License-Identifier: Apache-2.0
"""Load-balancing samplers of bagua.torch_api.contrib."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bagua.torch_api.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from torch.utils.data import DataLoader, TensorDataset


def _lengths(size: int) -> list[int]:
    generator = torch.Generator().manual_seed(size)
    lengths: list[int] = torch.randint(1, 1000, (size,), generator=generator).tolist()
    return lengths


def _samplers(lengths: Sequence[int], replicas: int, **options: Any) -> list[LoadBalancingDistributedSampler]:
    return [
        LoadBalancingDistributedSampler(lengths, lambda length: length, replicas, rank, **options)
        for rank in range(replicas)
    ]


def _by_definition(lengths: Sequence[int], replicas: int, seed: int, random_level: float) -> list[list[int]]:
    """Indices by rank."""
    generator = torch.Generator().manual_seed(seed)
    bound = int((max(lengths) - min(lengths)) * random_level + 1)
    noisy = torch.tensor(lengths) + torch.randint(bound, (len(lengths),), generator=generator)
    order = torch.sort(noisy, stable=True).indices.tolist()
    padded = order + order[: -len(order) % replicas]
    chunks = torch.tensor(padded).view(-1, replicas)
    ranks: list[list[int]] = chunks[torch.randperm(len(chunks), generator=generator)].t().tolist()
    return ranks


@pytest.mark.parametrize("random_level", [0, 0.3, 1.0])
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (10, 1), (12, 4), (101, 3)])
def test_indices_follow_the_definition(size: int, replicas: int, random_level: float) -> None:
    lengths = _lengths(size)
    samplers = _samplers(lengths, replicas, seed=5, random_level=random_level)
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert [list(one) for one in samplers] == _by_definition(lengths, replicas, 5 + epoch, random_level)
        assert [len(one) for one in samplers] == [math.ceil(size / replicas)] * replicas


def test_without_shuffling_the_order_is_that_of_complexity() -> None:
    lengths = _lengths(9)
    ranks = [list(one) for one in _samplers(lengths, 3, shuffle=False)]
    assert [index for chunk in zip(*ranks, strict=True) for index in chunk] == sorted(range(9), key=lengths.__getitem__)


def test_ranks_get_similar_complexity_at_the_same_time() -> None:
    lengths = _lengths(400)
    ranks = [list(one) for one in _samplers(lengths, 4)]
    spread = [max(lengths[i] for i in step) - min(lengths[i] for i in step) for step in zip(*ranks, strict=True)]
    # The chunks cut the sorted lengths, so their spreads do not overlap and add up to the whole range at most.
    assert sum(spread) <= max(lengths) - min(lengths)
    assert sorted(index for one in ranks for index in one) == list(range(400))


@pytest.mark.parametrize(("size", "replicas", "count"), [(10, 4, 2), (12, 4, 3), (3, 4, 0)])
def test_drop_last_drops_the_most_complex(size: int, replicas: int, count: int) -> None:
    lengths = _lengths(size)
    samplers = _samplers(lengths, replicas, drop_last=True)
    taken = [index for one in samplers for index in one]
    assert sorted(taken) == sorted(sorted(range(size), key=lengths.__getitem__)[: count * replicas])
    assert {len(one) for one in samplers} == {count}


def test_complexities_may_be_tensors_or_floats() -> None:
    dataset = TensorDataset(torch.randn(6, 2), torch.tensor([5, 3, 4, 0, 2, 1]))
    sampler = LoadBalancingDistributedSampler(dataset, lambda sample: sample[1], 1, 0, shuffle=False)
    assert [int(batch[1]) for batch in DataLoader(dataset, batch_size=1, sampler=sampler)] == [0, 1, 2, 3, 4, 5]
    sampler = LoadBalancingDistributedSampler([0.5, 0.25], float, 1, 0, shuffle=False)
    assert list(sampler) == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2}, "rank is to be 0 to num_replicas - 1 = 1, got 2"),
        ({"rank": -1}, "got -1"),
        ({"random_level": 1.1}, "random_level is to be 0.0 to 1.0, got 1.1"),
        ({"random_level": -0.1}, "got -0.1"),
        ({"dataset": []}, "the dataset is empty"),
        ({"num_replicas": None}, "process group has not been initialized"),
    ],
)
def test_wrong_arguments_of_the_sampler(arguments: dict[str, Any], message: str) -> None:
    given = {"dataset": [1, 2], "complexity_fn": int, "num_replicas": 2, "rank": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        LoadBalancingDistributedSampler(**given)


def _batches_of_100(lengths: Sequence[int], indices: list[int]) -> list[list[int]]:
    """Batches with a total length of 100 or more."""
    batches: list[list[int]] = [[]]
    for index in indices:
        if sum(lengths[i] for i in batches[-1]) >= 100:
            batches.append([])
        batches[-1].append(index)
    return batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_gets_as_many_batches(drop_last: bool) -> None:
    lengths = [length % 60 + 1 for length in _lengths(101)]
    samplers = [
        LoadBalancingDistributedBatchSampler(one, lambda indices: _batches_of_100(lengths, indices), drop_last)
        for one in _samplers(lengths, 3)
    ]
    plain = _samplers(lengths, 3)
    counts_differed = False
    for epoch in range(4):
        for sampler, one in zip(samplers, plain, strict=True):
            sampler.set_epoch(epoch)
            one.set_epoch(epoch)
        whole = [_batches_of_100(lengths, list(one)) for one in plain]
        counts = [len(one) for one in whole]
        counts_differed |= len(set(counts)) > 1
        expected = min(counts) if drop_last else max(counts)
        for sampler, batches in zip(samplers, whole, strict=True):
            assert len(sampler) == expected
            assert list(sampler) == (batches + batches)[:expected]
    assert counts_differed, "no epoch in which there was something to pad or to drop"


def test_short_rank_repeats_its_batches_as_often_as_it_takes() -> None:
    # 1 batch on rank 0, 5 on rank 1.
    sampler = _samplers(list(range(10)), 2, shuffle=False)[0]
    made = LoadBalancingDistributedBatchSampler(
        sampler, lambda indices: [indices] if indices[0] == 0 else [[index] for index in indices]
    )
    assert list(made) == [[0, 2, 4, 6, 8]] * 5


def test_wrong_arguments_of_the_batch_sampler() -> None:
    with pytest.raises(ValueError, match="sampler is to be a LoadBalancingDistributedSampler, got list"):
        LoadBalancingDistributedBatchSampler([1, 2], list)  # type: ignore[arg-type]
    dropping, keeping = _samplers([1, 2, 3], 1, drop_last=True)[0], _samplers([1, 2, 3], 2)[0]
    with pytest.raises(ValueError, match="drop_last of the sampler is to be False"):
        LoadBalancingDistributedBatchSampler(dropping, list)
    with pytest.raises(ValueError, match=r"every rank is to have a batch, batch_fn made \[.*0.*\]"):
        LoadBalancingDistributedBatchSampler(keeping, lambda indices: [indices] if 1 in indices else [])
