# SPDX-License-Identifier: Apache-2.0
"""A dataset whose samples are made once."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from bagua.torch_api.contrib.cache_loader import CacheLoader


class CachedDataset(Dataset[Any]):
    """A dataset of the same samples, which are kept in a store: the slow work of `dataset[i]` is done once.

    Of use where a sample takes longer to make (decoding, resampling, reading over a network) than to read from the
    store, and is the same every time: random augmentation belongs behind the cache, for its first outcome would stay.

    Args:
        dataset: with indices and a length.
        backend: as for `CacheLoader`.
        dataset_name: as for `CacheLoader`.
        writer_buffer_size: as for `CacheLoader`.
        **kwargs: as for `CacheLoader`; with `path="..."` all ranks of a host, and later runs, share what is stored.

    >>> cached = CachedDataset([10, 20, 30])
    >>> [cached[i] for i in range(len(cached))]
    [10, 20, 30]

    Definition: Bagua 0.9, whose default backend is "redis".
    """

    def __init__(
        self,
        dataset: Any,
        backend: str = "sqlite",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **kwargs: Any,
    ) -> None:
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, writer_buffer_size, **kwargs)

    def __getitem__(self, item: Any) -> Any:
        """Return `dataset[item]`, or a copy of what it was the first time."""
        return self.cache_loader.get(item, self.dataset.__getitem__)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)
