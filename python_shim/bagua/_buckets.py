# SPDX-License-Identifier: Apache-2.0
"""Smaller buckets than DDP's default, for gradients that travel between hosts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bagua._attachment import trainable_parameters
from bagua._native import _C
from bagua._torch_private import eager, has_delayed_parameters, has_rebuilt_buckets, is_joining, rebuild_buckets

# Of 42 MB of gradients between two hosts at 1 Gbit/s; see benchmarks/LOG.md for what other sizes give.
MOST_BYTES = 4 << 20


class BucketSplitter:
    """Cuts the buckets of a DDP model once, as soon as DDP has its final ones.

    It leaves a model alone whose user has chosen a size (`bucket_cap_mb`).
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: list[Tensor]) -> None:
        if not ddp.bucket_bytes_cap_default:
            return
        self._parameters = parameters
        if ddp.find_unused_parameters and not ddp.static_graph:
            _split(ddp, parameters)  # DDP never rebuilds the buckets of such a model
        else:
            self._removable = ddp.register_forward_pre_hook(self._after_rebuild)

    @eager
    def _after_rebuild(self, ddp: nn.Module, args: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        # What DDP itself does next in its forward; under join() something else has to come before it.
        if torch.is_grad_enabled() and not is_joining(ddp) and (has_rebuilt_buckets(ddp) or rebuild_buckets(ddp)):
            _split(ddp, self._parameters)
            self._removable.remove()


def _split(ddp: DistributedDataParallel, parameters: list[Tensor]) -> None:
    if ddp.logger is not None:
        _C.split_buckets(ddp.reducer, ddp.logger, parameters, MOST_BYTES)


def settle_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP build its final buckets, on a rank that is alone, before it has a hook; cut as `BucketSplitter` does.

    DDP builds them after the first backward otherwise, for which all ranks have to be there.

    Raises:
        ValueError: a model some of whose gradients have no bucket.
    """
    if has_delayed_parameters(ddp):
        raise ValueError(
            "delay_all_reduce_named_params does not work where members come and go: DDP averages those gradients by "
            "itself, also with what a newcomer's are that has not been healed yet"
        )
    parameters = trainable_parameters(ddp)
    rebuild_buckets(ddp, lambda: _C.settle_buckets(ddp.reducer))
    if ddp.bucket_bytes_cap_default and parameters[0].is_cpu:
        _split(ddp, parameters)
