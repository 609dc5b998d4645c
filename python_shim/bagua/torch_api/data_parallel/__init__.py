# SPDX-License-Identifier: Apache-2.0
"""Data parallelism in the manner of torch's DistributedDataParallel."""

from bagua.torch_api.data_parallel import functional
from bagua.torch_api.data_parallel.distributed import DistributedDataParallel, DistributedDataParallel_V1_9_0

__all__ = ["DistributedDataParallel", "DistributedDataParallel_V1_9_0", "functional"]
