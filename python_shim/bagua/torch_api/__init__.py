# SPDX-License-Identifier: Apache-2.0
"""The Python interface of the original Bagua, over this package's own parts: see docs/torch_api.md.

Importing it adds `with_bagua` to torch.nn.Module; `import bagua` alone changes nothing of torch.
"""

# `_patches` is what changes torch's classes.
from bagua.torch_api import _patches as _patches
from bagua.torch_api import algorithms, communication, contrib, env
from bagua.torch_api.communication import (
    ReduceOp,
    RepeatedInitializationError,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_coalesced_inplace,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_coalesced,
    broadcast_object,
    from_torch_group,
    gather,
    gather_inplace,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua.torch_api.distributed import BaguaModule, bagua_init
from bagua.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size
from bagua.torch_api.tensor import BaguaTensor

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "ReduceOp",
    "RepeatedInitializationError",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "bagua_init",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "communication",
    "contrib",
    "env",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]
