# SPDX-License-Identifier: Apache-2.0
"""Communication for PyTorch training when the network is the bottleneck.

A c10d backend (`init_process_group(backend="bagua")`) and algorithms that run inside stock DistributedDataParallel as
communication hooks, chosen by name::

    handle = bagua.register_comm_hook(ddp_model, "bytegrad")
"""

from bagua import compressed, fsdp
from bagua._handle import Handle
from bagua._native import Options, package_version
from bagua._optimizers import QAdamOptimizer
from bagua._registration import comm_hook, register_comm_hook
from bagua._registry import available_algorithms, available_codecs, describe
from bagua._stats import Stats

__version__ = package_version()

__all__ = [
    "Handle",
    "Options",
    "QAdamOptimizer",
    "Stats",
    "available_algorithms",
    "available_codecs",
    "comm_hook",
    "compressed",
    "describe",
    "fsdp",
    "register_comm_hook",
]
