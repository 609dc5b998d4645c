# SPDX-License-Identifier: Apache-2.0
"""A gradient's way where torchft's Manager says who takes part in a step.

A Manager's timeout is shorter than a group's, and what has failed may still run for a moment. DDP gets a bucket back,
and the next step writes into it, only when nothing else can. Where an operation fails, or is not over in time:

1. The error, or the timeout, is reported to the Manager: the step will not count.
2. The group is aborted, which ends its other operations, and those of replicas that wait for this one.
3. The programs of the operations return.
4. DDP gets the bucket as it is, and the backward ends without an error.
5. `should_commit` says no, and the Manager asks for another quorum, whose reconfigure makes the group usable again.
"""
# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

import logging
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua._buckets import settle_buckets
from bagua._native import _C
from bagua._registry import describe
from bagua._torch_private import backend_of

_logger = logging.getLogger("bagua")
# An aborted program returns within milliseconds, except on a machine that is much too busy.
_ABORT_TIME = timedelta(seconds=60)


class Manager(Protocol):
    """What is needed of torchft's Manager."""

    def wait_quorum(self) -> None:
        """Return when the members of this step are known, and the group consists of them."""

    def num_participants(self) -> int:
        """Return how many of them take part with gradients."""

    def is_participating(self) -> bool:
        """Return whether this one does; not while it heals."""

    def errored(self) -> Any:
        """Return what was reported in this step, or None."""

    def report_error(self, e: Exception) -> None:
        """Have the step not be taken."""

    def wrap_future(self, fut: torch.futures.Future[Any], default: Any) -> torch.futures.Future[Any]:
        """Report how `fut` fails, or that it takes longer than the manager's timeout; the result is `default` then."""


def prepare(ddp: DistributedDataParallel, algorithm: str, group: dist.ProcessGroup) -> None:
    """Refuse what cannot work under a Manager, and have DDP do by itself nothing that needs the other members."""
    if describe(algorithm)["optimizer"]:
        raise ValueError(
            f"algorithm {algorithm!r} acts on what the optimizer does, before a Manager knows whether the step counts: "
            "with manager= only those that reduce gradients work"
        )
    if group.size() != 1:
        raise ValueError(
            f"manager= needs a group that is alone until the manager brings the replicas together, this one has "
            f"{group.size()} ranks: make it with world_size=1 and enable_reconfigure=True"
        )
    device = next(ddp.parameters()).device
    if not isinstance(backend_of(group, device), _C.ProcessGroupBagua):
        raise ValueError("manager= needs a group of backend 'bagua', which the hook follows as its members change")
    if ddp.find_unused_parameters:
        raise ValueError(
            "manager= does not work with find_unused_parameters=True, for which DDP itself communicates at the end of "
            "a backward: a death in that moment would end this replica, too"
        )
    if ddp.static_graph:
        raise ValueError("manager= does not work with static_graph=True: a replica that joins has to lay out buckets")
    settle_buckets(ddp)
    if ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
        _logger.warning(
            "manager= switches DDP's broadcast_buffers off, as members change while a forward runs: each replica keeps "
            "running statistics of its own"
        )
    ddp.broadcast_buffers = False


class ManagedHook:
    """Runs an algorithm on the members of the step, and reports errors in the place of raising them."""

    def __init__(self, hook: _C.Hook, group: dist.ProcessGroup, manager: Manager) -> None:
        self._hook = hook
        self._group = group
        self._manager = manager

    def run(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of one bucket; after an error the gradients stay as they are."""
        gradients = bucket.buffer()
        if bucket.index() == 0:
            try:
                self._manager.wait_quorum()
            except Exception as error:
                self._manager.report_error(error)
        if self._manager.errored() is not None:
            # The others would wait for this bucket.
            self._group.abort()
            return _completed(gradients)
        # The manager watches this one and not that of the operation, which begins with a wait where members are new.
        ended: torch.futures.Future[None] = torch.futures.Future()
        watched = self._manager.wrap_future(ended, None)
        watched.add_done_callback(lambda _: None if ended.done() else self._group.abort())
        try:
            if not self._manager.is_participating():
                gradients.zero_()
            # The algorithm's mean is over all members, also those that heal; a sum has no divisor.
            is_mean = self._hook.options.get("average", True)
            factor = self._group.size() / max(1, self._manager.num_participants()) if is_mean else 1
            future = self._hook.run(bucket)
        except Exception as error:
            self._fail(ended, error)
            return _completed(gradients)

        def finish(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                mean = done.value()[0]
                if factor != 1:
                    mean.mul_(factor)
            except Exception as error:
                self._fail(ended, error)
                return gradients
            ended.set_result(None)
            return mean

        return future.then(finish)

    def _fail(self, ended: torch.futures.Future[None], error: Exception) -> None:
        ended.set_exception(error)  # type: ignore[arg-type]  # torch takes any exception
        self._group.abort()
        if not self._hook.wait_for_programs(_ABORT_TIME):
            raise RuntimeError(
                f"bagua: an operation that has failed did not return within {_ABORT_TIME.seconds} s, and may yet write "
                f"into a gradient: {error}"
            )


def _completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
