# SPDX-License-Identifier: Apache-2.0
"""Samplers that give all ranks samples of similar complexity at the same time.

Definition: Bagua 0.9. Same arguments, seed and epoch, same indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class LoadBalancingDistributedSampler(Sampler[int]):
    """Gives each rank a part of a dataset, so that what the ranks get at the same time is about equally complex.

    The indices are sorted by complexity and cut into chunks of `num_replicas`; rank r gets element r of each chunk,
    chunks in random order. With `drop_last=False` the last chunk is filled up with the simplest samples.

    Every rank has to be given the same dataset and arguments.

    Args:
        dataset: with a length and indices from 0; every sample is looked at once, when the sampler is made.
        complexity_fn: a number for a sample, such as its length.
        num_replicas: number of ranks, by default that of the default process group.
        rank: this rank, by default that in the default process group.
        shuffle: whether the order of chunks, and their composition as far as `random_level` says, changes from epoch to
            epoch.
        seed: of the shuffling, the same on all ranks.
        drop_last: whether to leave out the most complex samples that do not fill a chunk.
        random_level: 0 to 1: how much randomness to add to the complexities, as a part of their range. 0 balances best,
            1 shuffles best.

    Raises:
        ValueError: a `rank` that is none of `num_replicas`, a `random_level` outside 0 to 1, or an empty dataset.

    Call `set_epoch` before each epoch when shuffling.

    >>> sampler = LoadBalancingDistributedSampler([5, 1, 4, 2], lambda length: length, 2, 0, shuffle=False)
    >>> list(sampler)
    [1, 2]
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"LoadBalancingDistributedSampler: rank is to be 0 to num_replicas - 1 = {num_replicas - 1}, got {rank}"
            )
        if not 0.0 <= random_level <= 1.0:
            raise ValueError(f"LoadBalancingDistributedSampler: random_level is to be 0.0 to 1.0, got {random_level}")
        size = len(dataset)
        if size == 0:
            raise ValueError("LoadBalancingDistributedSampler: the dataset is empty")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.seed = seed
        self.num_samples = size // num_replicas if drop_last else math.ceil(size / num_replicas)
        self.total_size = self.num_samples * num_replicas
        self.item_complexity_map = {index: _number(complexity_fn(dataset[index])) for index in range(size)}
        self.ordered_item_complexity_map = _sorted_by_value(self.item_complexity_map)
        complexities = self.item_complexity_map.values()
        self.random_number = int((max(complexities) - min(complexities)) * random_level + 1)

    def shuffle_chunks(self) -> tuple[list[list[int]], list[int]]:
        """Return the chunks of indices for this epoch, and the order in which to take them."""
        if not self.shuffle:
            chunks = self._chunks(list(self.ordered_item_complexity_map))
            return chunks, list(range(len(chunks)))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        noise = torch.randint(self.random_number, (len(self.item_complexity_map),), generator=generator).tolist()
        noisy = {
            index: complexity + extra
            for (index, complexity), extra in zip(self.item_complexity_map.items(), noise, strict=True)
        }
        chunks = self._chunks(list(_sorted_by_value(noisy)))
        return chunks, torch.randperm(len(chunks), generator=generator).tolist()

    def _chunks(self, indices: Sequence[int]) -> list[list[int]]:
        # The last one begins again with the first indices.
        return [
            [indices[(chunk * self.num_replicas + place) % len(indices)] for place in range(self.num_replicas)]
            for chunk in range(self.num_samples)
        ]

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices."""
        chunks, order = self.shuffle_chunks()
        return iter([chunks[index][self.rank] for index in order])

    def __len__(self) -> int:
        """Return how many indices each rank gets."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Shuffle in another way, the same one on all ranks."""
        self.epoch = epoch


def _number(complexity: Any) -> Any:
    return complexity.item() if isinstance(complexity, torch.Tensor) else complexity


def _sorted_by_value(items: dict[int, Any]) -> dict[int, Any]:
    return dict(sorted(items.items(), key=lambda item: item[1]))


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Makes batches of varying size from what a `LoadBalancingDistributedSampler` gives, as many on every rank.

    Args:
        sampler: of the same dataset.
        batch_fn: cuts a list of indices into a list of batches, such as by total length. It is called for the indices
            of every rank, on every rank, and has to return the same each time.
        drop_last: whether ranks with more batches than others leave out their last ones; otherwise the others repeat
            their first ones.

    Raises:
        ValueError: a `sampler` of another class or one that drops samples; a rank without any batch to repeat.

    Call `set_epoch` before each epoch when shuffling.

    >>> sampler = LoadBalancingDistributedSampler([5, 1, 4, 2], lambda length: length, 1, 0, shuffle=False)
    >>> list(LoadBalancingDistributedBatchSampler(sampler, lambda indices: [indices[:3], indices[3:]]))
    [[1, 3, 2], [0]]
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(
                "LoadBalancingDistributedBatchSampler: sampler is to be a LoadBalancingDistributedSampler, got "
                f"{type(sampler).__qualname__}"
            )
        if sampler.drop_last:
            raise ValueError("LoadBalancingDistributedBatchSampler: drop_last of the sampler is to be False")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self.num_replicas = sampler.num_replicas
        self.rank = sampler.rank
        self.total_batch = 0
        self.padded_batches: list[list[list[int]]] = []
        self.generate_batches()

    def generate_batches(self) -> None:
        """Make the batches of all ranks for this epoch."""
        chunks, order = self.sampler.shuffle_chunks()
        batches = [list(self.batch_fn([chunks[index][rank] for index in order])) for rank in range(self.num_replicas)]
        lengths = [len(one) for one in batches]
        self.total_batch = min(lengths) if self.drop_last else max(lengths)
        if 0 in lengths and self.total_batch > 0:
            raise ValueError(
                "LoadBalancingDistributedBatchSampler: every rank is to have a batch, batch_fn made "
                f"{lengths} of them (by rank)"
            )
        self.padded_batches = [[one[index % len(one)] for index in range(self.total_batch)] for one in batches]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches."""
        return iter(self.padded_batches[self.rank])

    def __len__(self) -> int:
        """Return how many batches each rank gets."""
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Shuffle in another way, the same one on all ranks."""
        self.sampler.set_epoch(epoch)
        self.generate_batches()
