# SPDX-License-Identifier: Apache-2.0
"""Tells an algorithm how far a training step of a DDP model has come, through torch's own hooks."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua._native import _C
from bagua.optimizers import QAdamOptimizer

_logger = logging.getLogger("bagua")
_OPTIMIZER_CLASSES = {"Optimizer": Optimizer, "QAdamOptimizer": QAdamOptimizer}


def trainable_parameters(ddp: DistributedDataParallel) -> list[Tensor]:
    """Parameters whose gradients DDP reduces, in the order of the module."""
    ignored = ddp.parameters_to_ignore
    return [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def check_optimizer(ddp: DistributedDataParallel, optimizer: Any, algorithm: str, expected: str) -> None:
    """Refuse an optimizer that is missing, of another class than `expected`, or not that of the model."""
    if not expected:
        return
    if optimizer is None:
        raise ValueError(f"algorithm {algorithm!r} acts on what the optimizer does: pass it as optimizer=")
    if not isinstance(optimizer, _OPTIMIZER_CLASSES[expected]):
        kind = "bagua.QAdamOptimizer" if expected == "QAdamOptimizer" else "torch.optim.Optimizer"
        raise ValueError(
            f"algorithm {algorithm!r} needs an optimizer of class {kind}, got {type(optimizer).__qualname__}"
        )
    known = {p for group in optimizer.param_groups for p in group["params"]}
    names = {p: name for name, p in ddp.module.named_parameters()}
    missing = [names[p] for p in trainable_parameters(ddp) if p not in known]
    if missing:
        raise ValueError(
            f"the optimizer given to algorithm {algorithm!r} does not hold {len(missing)} of the model's trainable "
            f"parameters ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}): pass the one that trains them"
        )


def _check_for_background(ddp: DistributedDataParallel, algorithm: str) -> None:
    reason = f"ranks may take different numbers of steps with algorithm {algorithm!r}"
    if ddp.find_unused_parameters and not ddp.static_graph:
        raise ValueError(f"{reason}, but find_unused_parameters=True communicates in every step: switch it off")
    if any(isinstance(module, nn.SyncBatchNorm) for module in ddp.modules()):
        raise ValueError(f"{reason}, but SyncBatchNorm communicates in every forward: use BatchNorm")


def check_model(ddp: DistributedDataParallel, algorithm: str, runs_in_background: bool) -> None:
    """Refuse a model that communicates where the algorithm must not."""
    if runs_in_background:
        _check_for_background(ddp, algorithm)


class Attachment:
    """The hooks on one model and its optimizer, for as long as the algorithm is at work."""

    def __init__(
        self, hook: _C.Hook, ddp: DistributedDataParallel, optimizer: Optimizer, *, runs_in_background: bool
    ) -> None:
        self._hook = hook
        # Not the model itself, which holds us.
        self._ddp = weakref.ref(ddp)
        self._parameters = trainable_parameters(ddp)
        self._momentum_optimizer = optimizer if isinstance(optimizer, QAdamOptimizer) else None
        self._broadcasts_buffers = ddp.broadcast_buffers
        self._runs_in_background = runs_in_background
        if runs_in_background and ddp.broadcast_buffers:
            if any(True for _ in ddp.module.buffers()):
                _logger.warning(
                    "algorithm %r switches DDP's broadcast_buffers off: each rank keeps running statistics of its own "
                    "until handle.abort(), which gives all ranks those of rank 0",
                    hook.name,
                )
            ddp.broadcast_buffers = False
        self._removable = [
            ddp.register_forward_pre_hook(self._before_forward),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @torch.compiler.disable
    def _before_forward(self, ddp: nn.Module, args: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        if ddp._join_config.enable:
            raise RuntimeError(
                f"join() does not work with algorithm {self._hook.name!r}: ranks that have run out of data would spoil "
                "its state. Give all ranks the same number of steps"
            )
        if ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            optimizer = self._momentum_optimizer
            self._hook.before_forward([] if optimizer is None else optimizer.momenta(self._parameters))

    @torch.compiler.disable
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._hook.after_step()

    def broadcast_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, as DDP does before a forward. Collective."""
        ddp = self._ddp()
        if ddp is None or not (self._runs_in_background and self._broadcasts_buffers):
            return
        root = dist.get_global_rank(ddp.process_group, 0)
        for buffer in ddp.module.buffers():
            dist.broadcast(buffer, root, group=ddp.process_group)

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._removable:
            handle.remove()
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self._broadcasts_buffers
