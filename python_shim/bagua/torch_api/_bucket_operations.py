# SPDX-License-Identifier: Apache-2.0
"""What can be done to a bucket: see the `append_*_op` methods of `BaguaBucket`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from bagua._executors import shared_executors_for
from bagua._native import _C

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket
    from bagua.torch_api.communication import BaguaProcessGroup


class Operation(Protocol):
    """One operation of a bucket, the same on every rank."""

    @property
    def runs_python(self) -> bool:
        """Whether `start` does the work itself and has to run on the model's thread."""

    def start(self, bucket: BaguaBucket, executors: Any) -> dist.Work | None:
        """Begin it; None if it is done already. `executors` are the model's, for operations without a group."""


class PythonOperation:
    """Calls a function."""

    runs_python = True

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    def start(self, bucket: BaguaBucket, executors: Any) -> None:
        """Call it with the bucket's name."""
        self._function(bucket.name)


class CentralizedOperation:
    """Mean or sum over the ranks."""

    runs_python = False

    def __init__(
        self, group: BaguaProcessGroup | None, *, hierarchical: bool, average: bool, is_compressed: bool
    ) -> None:
        self._group = group
        self._settings = (hierarchical, average, is_compressed)

    def start(self, bucket: BaguaBucket, executors: Any) -> dist.Work | None:
        """Begin it."""
        if self._group is not None:
            executors = shared_executors_for(self._group.torch_group, bucket.backend_tensor.device)
        return _C.reduce_flat(executors, bucket.backend_tensor, *self._settings)
