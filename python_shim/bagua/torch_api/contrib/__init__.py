# SPDX-License-Identifier: Apache-2.0
"""Additions around training: samplers, cached datasets, batch normalisation over ranks, fused optimizers."""

from bagua.torch_api.contrib.cache_loader import CacheLoader
from bagua.torch_api.contrib.cached_dataset import CachedDataset
from bagua.torch_api.contrib.fuse import fuse_optimizer
from bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "SyncBatchNorm",
    "fuse_optimizer",
]
