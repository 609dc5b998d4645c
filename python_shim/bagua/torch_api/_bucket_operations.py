# SPDX-License-Identifier: Apache-2.0
"""What can be done to a bucket: see the `append_*_op` methods of `BaguaBucket`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bagua._executors import shared_executors_for
from bagua._native import _C
from bagua.torch_api.tensor import as_bagua

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


class _GroupOperation:
    runs_python = False

    def __init__(self, group: BaguaProcessGroup | None) -> None:
        self._group = group

    def _executors(self, bucket: BaguaBucket, model_executors: Any) -> Any:
        if self._group is None:
            return model_executors
        return shared_executors_for(self._group.torch_group, bucket.backend_tensor.device)


class CentralizedOperation(_GroupOperation):
    """Mean or sum over the ranks."""

    def __init__(
        self, group: BaguaProcessGroup | None, *, hierarchical: bool, average: bool, is_compressed: bool
    ) -> None:
        super().__init__(group)
        self._settings = (hierarchical, average, is_compressed)

    def start(self, bucket: BaguaBucket, executors: Any) -> dist.Work | None:
        """Begin it."""
        return _C.reduce_flat(self._executors(bucket, executors), bucket.backend_tensor, *self._settings)


class DecentralizedOperation(_GroupOperation):
    """Fills a buffer with the average of the weights and those of the peers."""

    def __init__(self, group: BaguaProcessGroup | None, peer_weight: Tensor, hierarchical: bool, mode: str) -> None:
        super().__init__(group)
        self._peer_weight = peer_weight
        self._hierarchical = hierarchical
        self._mode = mode
        self._exchanges = 0

    def start(self, bucket: BaguaBucket, executors: Any) -> dist.Work | None:
        """Copy the weights into the buffer and begin the exchange."""
        flat = as_bagua(self._peer_weight).bagua_getter_closure().view(-1)
        with torch.no_grad():
            flat.copy_(bucket.backend_tensor)
        exchange, self._exchanges = self._exchanges, self._exchanges + 1
        return _C.average_peers(self._executors(bucket, executors), flat, exchange, self._hierarchical, self._mode)

    def copy_back_peer_weight(self, bucket: BaguaBucket) -> None:
        """Replace the bucket's weights by the average, once the exchange has been waited for."""
        with torch.no_grad():
            bucket.backend_tensor.copy_(as_bagua(self._peer_weight).bagua_getter_closure().view(-1))
        bucket.scatter_back()


class RingOperation(_GroupOperation):
    """Draws weights to those of the neighbours by 8-bit differences."""

    def __init__(self, group: BaguaProcessGroup | None, replicas: Sequence[Tensor], hierarchical: bool) -> None:
        super().__init__(group)
        self._replicas = replicas
        self._hierarchical = hierarchical

    def start(self, bucket: BaguaBucket, executors: Any) -> dist.Work | None:
        """Begin it."""
        own, left, right = (as_bagua(replica).bagua_getter_closure().view(-1) for replica in self._replicas)
        return _C.exchange_in_ring(
            self._executors(bucket, executors), bucket.backend_tensor, own, left, right, self._hierarchical
        )


class AsynchronousAverageOperation(_GroupOperation):
    """Draws the weights of the ranks together while these train: `weights += mean of all copies - own copy`.

    The rounds are those of algorithm "async". A loop of the user's, on a thread beside the training, starts them:

        while operation.get_status():
            for tensor in bucket.tensors:
                tensor.bagua_mark_communication_ready_without_synchronization()
            model._bagua_backend.wait_pending_comm_ops()

    The model's thread of operations copies the weights, starts the round, waits for it, and changes the weights, while
    nobody holds them by `lock_weight`: what a rank learns between the copy and the change is kept. Rounds are
    collective: ranks go on with them until the last one has called `abort`, so that none is left alone in one.
    """

    runs_python = True

    def __init__(self, group: BaguaProcessGroup | None, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self._weights_lock = threading.Lock()
        self._wants_to_end = False
        self._is_running = True

    def start(self, bucket: BaguaBucket, executors: Any) -> None:
        """Do one round, and find whether all ranks have called `abort`."""
        weights = bucket.backend_tensor
        one_round = _C.AverageRound(self._executors(bucket, executors), weights, self._wants_to_end)
        is_last = one_round.wait()
        self.lock_weight()
        try:
            weights.add_(one_round.take_change())
        finally:
            self.unlock_weight()
        self._is_running = not is_last

    def lock_weight(self) -> None:
        """Keep rounds from changing the weights, until `unlock_weight`. What this stream has still to do is awaited."""
        self._finish_stream()
        self._weights_lock.acquire()

    def unlock_weight(self) -> None:
        """Let rounds change the weights again."""
        self._finish_stream()
        self._weights_lock.release()

    def abort(self) -> None:
        """End the rounds, once all ranks have called this."""
        self._wants_to_end = True

    def reset(self) -> None:
        """Allow rounds again, after `abort` on all ranks."""
        self._wants_to_end = False
        self._is_running = True

    def get_status(self) -> bool:
        """Whether there are more rounds to do."""
        return self._is_running

    def _finish_stream(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
