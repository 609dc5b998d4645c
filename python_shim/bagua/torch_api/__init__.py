# SPDX-License-Identifier: Apache-2.0
"""The Python interface of the original Bagua, over this package's own parts: see docs/torch_api.md.

Importing it adds `with_bagua` to torch.nn.Module; `import bagua` alone changes nothing of torch.
"""

import torch

from bagua.torch_api import algorithms, communication, contrib, env
from bagua.torch_api.communication import *  # noqa: F403  # each name of its __all__
from bagua.torch_api.distributed import BaguaModule, bagua_init
from bagua.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size
from bagua.torch_api.tensor import BaguaTensor

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "algorithms",
    "bagua_init",
    "communication",
    "contrib",
    "env",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
]
__all__ += communication.__all__


def _install(methods: type, kind: type) -> None:
    """Give a class of torch the methods of the original."""
    for name, member in vars(methods).items():
        if not name.startswith("__"):
            setattr(kind, name, member)


_install(BaguaModule, torch.nn.Module)
_install(BaguaTensor, torch.Tensor)
