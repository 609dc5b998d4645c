# SPDX-License-Identifier: Apache-2.0
"""Tells an algorithm that trains in rounds how far a step of a model that `fully_shard` has sharded has come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.functional import pad
from torch.optim import Optimizer

from bagua._attachment import check_layers, check_optimizer, check_weights, moves_nothing
from bagua._belongings import Belongings
from bagua._native import _C
from bagua._registry import describe
from bagua._sharded_model import ShardedModel
from bagua._tensors_apart import gathered, tensors_in
from bagua._torch_private import eager, local_part, padded_shard, version_of

_logger = logging.getLogger("bagua")


def is_in_rounds(algorithm: str) -> bool:
    """Return whether ranks train on their own with an algorithm, and exchange weights every so many steps."""
    info = describe(algorithm)
    return info["runs_in_background"] and not info["steps_may_differ"]


def check_rounds(sharded: ShardedModel, model: nn.Module, optimizer: Any, algorithm: str) -> None:
    """Refuse what cannot be trained in rounds, and leave the frozen parameters out of what is exchanged."""
    if not sharded.is_hybrid:
        raise ValueError(
            f"algorithm {algorithm!r} trains each host on its own, which needs all weights on every host: shard the "
            "model on a mesh of two dimensions, of which the second one is a host"
        )
    sharded.leave_frozen_out()
    if any(padded_shard(parameter).device != sharded.device for parameter in sharded.parameters):
        raise ValueError(
            f"algorithm {algorithm!r} does not go together with offload_policy=CPUOffloadPolicy() on a GPU"
        )
    check_weights(sharded.trained, algorithm)
    check_layers(model, algorithm)
    check_optimizer(sharded.trained, optimizer, algorithm)


def warn_of_replicas_inside_hosts(sharded: ShardedModel, algorithm: str) -> None:
    """Say on one rank where the mesh has hosts along its other dimension: every step then travels between them.

    Collective.
    """
    groups = (sharded.group, sharded.shards)
    replicas, shards = (len(set(gathered(_C.local_host_id(), group, sharded.device))) for group in groups)
    if replicas == 1 and shards > 1 and dist.get_rank() == 0:
        _logger.warning(
            "algorithm %r exchanges weights inside a host, and shards are gathered between %d hosts in every step: "
            "the first dimension of the mesh is for hosts, and the second for the ranks of each",
            algorithm,
            shards,
        )


class ShardedRounds:
    """The hooks on a sharded model and its optimizer, for as long as an algorithm in rounds is at work.

    The algorithm takes this rank's shards of the trained parameters, with the rows that make all shards as long, for
    the parameters of a model of its own, and exchanges them with the ranks that hold the same shards.
    """

    def __init__(self, model: nn.Module, sharded: ShardedModel) -> None:
        self._model = model
        self._sharded = sharded
        self.shards: list[Tensor] = [padded_shard(parameter) for parameter in sharded.parameters]
        # The gradient of each, and its version, when the shard got it.
        self._shown: list[tuple[Tensor, int] | None] = [None] * len(self.shards)
        # Whether the optimizer zeroes gradients by an operation on all of them, which changes no version.
        self._zeroes_unseen = False
        # Whether a forward was seen since the optimizer's last step: several backwards may follow it, or of several.
        self._is_announced = False
        self._removable: list[Any] = []

    def attach(self, hook: _C.Hook, optimizer: Optimizer) -> None:
        self._hook = hook
        self._optimizer = optimizer
        self._zeroes_unseen = any(optimizer.defaults.get(kind) for kind in ("foreach", "fused"))
        self._removable = [
            # Before FSDP2 gathers: weights may change there.
            self._model.register_forward_pre_hook(self._before_forward, prepend=True),
            self._model.register_forward_hook(self._after_forward, always_call=True),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @eager
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        now = map(padded_shard, self._sharded.parameters)
        if any(one.data_ptr() != own.data_ptr() for one, own in zip(now, self.shards, strict=True)):
            raise RuntimeError(
                f"bagua.fsdp: weights are no longer in the memory that they were in when algorithm {self._hook.name!r} "
                "was registered, as after load_state_dict(assign=True) or model.to(): call handle.remove() before, and "
                "compress() afterwards"
            )
        self._show_zeroed_gradients()
        self.changing_weights(lambda: self._hook.before_forward([]))
        self._is_announced = True

    @eager
    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        outputs = list(tensors_in(output))
        self._hook.after_forward(outputs)
        differentiable = [leaf for leaf in outputs if leaf.requires_grad]
        if differentiable:
            register_multi_grad_hook(differentiable, self._at_backward, mode="any")

    @eager
    def _at_backward(self, gradient: Tensor) -> None:
        self._show_zeroed_gradients()
        self._hook.at_backward(is_bypassed=False)

    def after_backward(self) -> None:
        """Note the end of a backward in which gradients were reduced."""
        if not self._is_announced:
            raise RuntimeError(
                f"bagua.fsdp: algorithm {self._hook.name!r} has not seen the forward of this backward: call the model "
                "given to compress() itself, not another of its methods, and in training mode (to freeze parts of it, "
                "put those in evaluation mode)"
            )
        self.show_gradients()
        self._hook.after_backward()

    @eager
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._hook.is_before_step and moves_nothing(optimizer):
            return
        self._hook.after_step()
        self._is_announced = False
        # What they were is known, and their memory is the user's.
        self._shown = [None] * len(self.shards)
        for shard in self.shards:
            shard.grad = None

    def show_gradients(self) -> None:
        """Give the shards the gradients that the parameters have now: by these skipped steps are found.

        One that was changed is another tensor: what changes a DTensor leaves the version of its part as it was.
        """
        for place, (parameter, shard) in enumerate(zip(self._sharded.parameters, self.shards, strict=True)):
            gradient = parameter.sharded_param.grad
            if gradient is None:
                shard.grad = self._shown[place] = None
                continue
            former, moment = self._shown[place], (gradient, version_of(gradient))
            if former is not None and former[0] is gradient and former[1] == moment[1]:
                continue
            self._shown[place] = moment
            own = local_part(gradient).detach()
            if own.shape != shard.shape:
                own = pad(own, [0, 0] * (own.dim() - 1) + [0, len(shard) - len(own)])
            shard.grad = own.to(shard.dtype)

    def _show_zeroed_gradients(self) -> None:
        """Show gradients, also those of a skipped step that were zeroed unseen. Collective among the ranks of a host.

        A rank alone cannot tell: its shards may have gradients of zeros.
        """
        self.show_gradients()
        found = [p.sharded_param.grad for p in self._sharded.parameters if p.sharded_param.grad is not None]
        if not (self._zeroes_unseen and self._hook.is_before_step and found):
            return
        if not self._holds_on_any(any(bool(local_part(one).any()) for one in found)):
            self._shown = [None] * len(self.shards)
            self.show_gradients()

    def _holds_on_any(self, here: bool) -> bool:
        """Whether something holds on any of the ranks that have the other shards. Collective."""
        found = torch.tensor(float(here), device=self._sharded.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._sharded.shards)
        return bool(found)

    def show_last_gradients(self) -> None:
        """Show the gradients of a step after which no forward comes. Collective among the ranks of a host.

        An overflow in one shard makes a scaler skip the step on all of them, so each has to see one of its own.
        """
        self._show_zeroed_gradients()
        gradients = [shard.grad for shard in self.shards if shard.grad is not None]
        if self._holds_on_any(not all(bool(one.isfinite().all()) for one in gradients)) and gradients:
            place = next(place for place, shard in enumerate(self.shards) if shard.grad is not None)
            self._shown[place] = None
            self.shards[place].grad = torch.full_like(self.shards[place], torch.inf)

    def changing_weights(self, call: Callable[[], Any]) -> Any:
        """Call what may change shards, and have FSDP2 gather those anew that it still holds whole, as after a test."""
        before = sum(map(version_of, self.shards))
        result = call()
        if sum(map(version_of, self.shards)) != before:
            for module in self._sharded.modules:
                module.reshard()
        return result

    def leave(self) -> None:
        """Make the hosts equal, and leave the model to FSDP2. Collective."""
        self.show_last_gradients()
        self.changing_weights(self._hook.count_skipped_step)
        parameters = [parameter.sharded_param for parameter in self._sharded.parameters]
        belongings = Belongings(self._optimizer, parameters, is_before_step=self._hook.is_before_step)
        self.changing_weights(
            lambda: self._hook.leave(belongings.moment, belongings.shapes, belongings.state, belongings.gradients)
        )
        belongings.write_back()
        for handle in self._removable:
            handle.remove()
