# SPDX-License-Identifier: Apache-2.0
"""Runs the buckets of one model in their order, each as soon as all of its tensors are ready."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.torch_api.algorithms.base import some
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.tensor import as_bagua, set_backend


class Scheduler:
    """The buckets of one model, as a ring: the front one goes when it is ready, then it is the next one's turn.

    That one order is the same on every rank. Operations of the backend go to its own queue at once. Where a bucket has
    Python operations all run on one thread, each waiting for the one before it.

    Args:
        make_executors: makes, collectively, what operations without a group of their own run on. Called once per device
            at the first registration that needs it; its argument tells whether they run beside the training thread.
    """

    def __init__(self, make_executors: Callable[[torch.device, bool], Any]) -> None:
        self._make_executors = make_executors
        self._executors: dict[tuple[torch.device, bool], Any] = {}
        self._buckets: list[BaguaBucket] = []
        # Position of its bucket and in it.
        self._place_of: dict[Tensor, tuple[int, int]] = {}
        self._ready: list[set[int]] = []
        self._front = 0
        self._thread: ThreadPoolExecutor | None = None
        self._launched: list[tuple[BaguaBucket, list[dist.Work] | Future[None]]] = []

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Replace all buckets. Collective. Nothing may be pending.

        Raises:
            ValueError: a tensor is in two buckets, of which one could never go.
        """
        places = _places(buckets)
        self.wait_pending_comm_ops()
        for tensor in self._place_of:
            set_backend(tensor, None)
        self._buckets = list(buckets)
        self._ready = [set() for _ in buckets]
        self._front = 0
        self._place_of = places
        for tensor in places:
            set_backend(tensor, self)
        runs_python = any(bucket.has_python_ops for bucket in buckets)
        if runs_python and self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="bagua_ops")
        elif not runs_python and self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        for bucket in buckets:
            key = (bucket.backend_tensor.device, runs_python)
            if key not in self._executors:
                self._executors[key] = self._make_executors(*key)

    def mark_communication_ready(self, tensor: Tensor) -> None:
        position, index = self._place_of[tensor]
        ready = self._ready[position]
        if index in ready:
            raise RuntimeError(
                f"tensor {as_bagua(tensor).bagua_tensor_name!r} was marked ready twice before its bucket could go: one"
                " of its other tensors, or of the buckets before it, has not been marked since"
            )
        self._buckets[position].gather_at(index)
        ready.add(index)
        while self._buckets and len(self._ready[self._front]) == len(self._buckets[self._front].tensors):
            self._ready[self._front].clear()
            front, self._front = self._buckets[self._front], (self._front + 1) % len(self._buckets)
            self._launch(front)

    def check_none_waits(self) -> None:
        """Raise RuntimeError where tensors are marked ready whose bucket has not gone: nothing would make it go."""
        waiting = [self._name(position, index) for position, ready in enumerate(self._ready) for index in ready]
        if not waiting:
            return
        front = self._buckets[self._front]
        marked = self._ready[self._front]
        missing = [self._name(self._front, index) for index in range(len(front.tensors)) if index not in marked]
        raise RuntimeError(
            f"tensors were marked ready but not communicated ({some(waiting)}): it is the turn of bucket "
            f"{front.name!r}, of which {some(missing)} was not marked"
        )

    def start_over(self) -> None:
        """Forget the marks of a backward that has not come to its end; what had gone is waited for."""
        for ready in self._ready:
            ready.clear()
        self._front = 0
        self.wait_pending_comm_ops()

    def _name(self, position: int, index: int) -> str:
        return as_bagua(self._buckets[position].tensors[index]).bagua_tensor_name

    def _launch(self, bucket: BaguaBucket) -> None:
        executors = self._executors[bucket.backend_tensor.device, self._thread is not None]
        if self._thread is None:
            works: list[dist.Work] = []
            self._launched.append((bucket, works))
            for _, operations in itertools.groupby(bucket.operations, lambda operation: id(operation.group)):
                # A group has a queue of its own, which knows nothing of what another one still does to the bucket.
                for work in works:
                    work.wait()
                started = [operation.start(bucket, executors) for operation in operations]
                works.extend(work for work in started if work is not None)
            return
        stream = torch.cuda.current_stream(bucket.backend_tensor.device) if bucket.backend_tensor.is_cuda else None
        self._launched.append((bucket, self._thread.submit(_run, bucket, executors, stream)))

    def wait_pending_comm_ops(self) -> int:
        """Wait for all buckets that have gone, and bring their values back to tensors that are not flattened.

        Returns:
            how many there were. On CUDA the current stream waits, not the host, unless Python operations ran.
        """
        launched, self._launched = self._launched, []
        failures: list[Exception] = []
        for bucket, pending in launched:
            try:
                _finish(bucket, pending)
            except Exception as failure:  # the buckets after it are still at work on memory of the model's
                failures.append(failure)
        if failures:
            raise failures[0]
        return len(launched)

    def close(self) -> None:
        """Wait, let go of the buckets and end the thread."""
        self.register_ordered_buckets([])


def _places(buckets: Sequence[BaguaBucket]) -> dict[Tensor, tuple[int, int]]:
    places: dict[Tensor, tuple[int, int]] = {}
    for position, bucket in enumerate(buckets):
        for index, tensor in enumerate(bucket.tensors):
            if tensor in places:
                raise ValueError(
                    f"tensor {as_bagua(tensor).bagua_tensor_name!r} is in bucket {bucket.name!r} and in bucket "
                    f"{buckets[places[tensor][0]].name!r}: each tensor goes in one"
                )
            places[tensor] = position, index
    return places


def _finish(bucket: BaguaBucket, pending: list[dist.Work] | Future[None]) -> None:
    if isinstance(pending, Future):
        pending.result()
    else:
        for work in pending:
            work.wait()
    bucket.scatter_back()


def _run(bucket: BaguaBucket, executors: Any, stream: torch.cuda.Stream | None) -> None:
    with torch.no_grad(), torch.cuda.stream(stream):
        for operation in bucket.operations:
            work = operation.start(bucket, executors)
            if work is not None:
                work.wait()
        if stream is not None:
            stream.synchronize()
