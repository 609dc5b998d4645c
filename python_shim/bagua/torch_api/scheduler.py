# SPDX-License-Identifier: Apache-2.0
"""Runs the buckets of one model in their order, each as soon as all of its tensors are ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.tensor import as_bagua


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
        self._bucket_of: dict[Tensor, BaguaBucket] = {}
        self._ready: list[set[Tensor]] = []
        self._front = 0
        self._thread: ThreadPoolExecutor | None = None
        self._launched: list[tuple[BaguaBucket, list[dist.Work] | Future[None]]] = []

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Replace all buckets. Collective. Nothing may be pending."""
        self.wait_pending_comm_ops()
        for tensor in self._bucket_of:
            as_bagua(tensor)._bagua_backend = None  # type: ignore[attr-defined]
        self._buckets = list(buckets)
        self._ready = [set() for _ in buckets]
        self._front = 0
        self._bucket_of = {tensor: bucket for bucket in buckets for tensor in bucket.tensors}
        for tensor in self._bucket_of:
            as_bagua(tensor)._bagua_backend = self  # type: ignore[attr-defined]
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
        """See `BaguaTensor.bagua_mark_communication_ready`."""
        bucket = self._bucket_of[tensor]
        ready = self._ready[self._buckets.index(bucket)]
        if tensor in ready:
            raise RuntimeError(
                f"tensor {as_bagua(tensor).bagua_tensor_name!r} was marked ready twice before its bucket could go: does"
                " the backward pass come to the parameter twice (reentrant checkpointing)?"
            )
        bucket.gather(tensor)
        ready.add(tensor)
        while self._buckets and len(self._ready[self._front]) == len(self._buckets[self._front].tensors):
            self._ready[self._front].clear()
            front, self._front = self._buckets[self._front], (self._front + 1) % len(self._buckets)
            self._launch(front)

    def is_ready(self, tensor: Tensor) -> bool:
        """Whether the tensor is marked and waits for others."""
        return tensor in self._ready[self._buckets.index(self._bucket_of[tensor])]

    def _launch(self, bucket: BaguaBucket) -> None:
        executors = self._executors[bucket.backend_tensor.device, self._thread is not None]
        if self._thread is None:
            works = [operation.start(bucket, executors) for operation in bucket.operations]
            self._launched.append((bucket, [work for work in works if work is not None]))
            return
        stream = torch.cuda.current_stream(bucket.backend_tensor.device) if bucket.backend_tensor.is_cuda else None
        self._launched.append((bucket, self._thread.submit(_run, bucket, executors, stream)))

    def wait_pending_comm_ops(self) -> int:
        """Wait for all buckets that have gone, and bring their values back to tensors that are not flattened.

        Returns:
            how many there were. On CUDA the current stream waits, not the host, unless Python operations ran.
        """
        launched, self._launched = self._launched, []
        for bucket, pending in launched:
            if isinstance(pending, Future):
                pending.result()
            else:
                for work in pending:
                    work.wait()
            bucket.scatter_back()
        return len(launched)

    def close(self) -> None:
        """Wait, let go of the buckets and end the thread."""
        self.register_ordered_buckets([])


def _run(bucket: BaguaBucket, executors: Any, stream: torch.cuda.Stream | None) -> None:
    with torch.no_grad(), torch.cuda.stream(stream):
        for operation in bucket.operations:
            work = operation.start(bucket, executors)
            if work is not None:
                work.wait()
        if stream is not None:
            stream.synchronize()
