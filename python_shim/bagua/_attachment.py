# SPDX-License-Identifier: Apache-2.0
"""Tells an algorithm how far a training step of a DDP model has come, through torch's own hooks."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua._belongings import Belongings
from bagua._executors import begin_again
from bagua._message_bytes import Parameter, sentence
from bagua._native import _C
from bagua._optimizers import QAdamOptimizer
from bagua._registry import describe
from bagua._tensors_apart import broadcast_tensor, tensors_in
from bagua._torch_private import divides_by_ranks_at_work, eager, has_step_hooks, is_joining

PICKLE_ADVICE = (
    "a model with a bagua communication hook cannot be pickled or deep-copied: the copy would train without the hook. "
    "Save model.module.state_dict() and the state_dict() of the handle, or of comm_hook's state, instead"
)
_logger = logging.getLogger("bagua")
_OPTIMIZER_CLASSES: dict[str, type[Optimizer]] = {"Optimizer": Optimizer, "QAdamOptimizer": QAdamOptimizer}
# By name, as to import the second takes time. Algorithms that act on weights do not work with them.
_UNFIT_OPTIMIZERS = {
    "LBFGS": "which takes another number of backwards in each step",
    "ZeroRedundancyOptimizer": "whose steps send weights, too",
}


def trained_by_name(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters whose gradients DDP reduces, in the order of the module."""
    found: dict[Tensor, str] = {}
    for prefix, module in ddp.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # DDP ignores one of the model itself by a name with a point, and a shared one by all its names.
            if parameter.requires_grad and f"{prefix}.{name}" not in ddp.parameters_to_ignore:
                found.setdefault(parameter, f"{prefix}.{name}".removeprefix("."))
    return {name: parameter for parameter, name in found.items()}


def trainable_parameters(ddp: DistributedDataParallel) -> list[Tensor]:
    return list(trained_by_name(ddp).values())


def synchronised_buffers(ddp: DistributedDataParallel) -> list[Tensor]:
    """Return the buffers that DDP keeps the same on all ranks, in the order of the module."""
    return [buffer for name, buffer in ddp.module.named_buffers() if name not in ddp.parameters_to_ignore]


def names_and_roles(module: nn.Module, parameters: list[Tensor]) -> list[tuple[str, str]]:
    """Return the name of each parameter, and whether it is an "embedding" or of the output "head", or "" for neither.

    The head is the last linear layer of the module. A weight that is shared with an embedding is an embedding.
    """
    roles: dict[Tensor, str] = {}
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for head in linear[-1:]:
        roles.update(dict.fromkeys(head.parameters(recurse=False), "head"))
    for layer in module.modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            roles.update(dict.fromkeys(layer.parameters(recurse=False), "embedding"))
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return [(names.get(parameter, ""), roles.get(parameter, "")) for parameter in parameters]


def refuse_uneven_division(ddp: nn.Module, args: Any) -> None:
    """Refuse, as a forward pre-hook, what a hook that divides by the number of all ranks cannot do."""
    # torch divides by the ranks still at work only where no hook is registered.
    assert isinstance(ddp, DistributedDataParallel)
    if is_joining(ddp) and divides_by_ranks_at_work(ddp):
        raise RuntimeError(
            "join(divide_by_initial_world_size=False) is not supported with a bagua communication hook, which divides "
            "by the number of all ranks: use the default"
        )


def say_if_nothing_is_coded(hook: _C.Hook, group: dist.ProcessGroup) -> None:
    """Log one line, on rank 0, where the algorithm could compress, but not between the ranks that there are."""
    if group.rank() == 0 and hook.why_uncoded:
        _logger.warning("algorithm %r compresses nothing. %s", hook.name, hook.why_uncoded)


def say_what_is_sent(
    hook: _C.Hook, group: dist.ProcessGroup, parameters: list[Parameter], optimizer: Optimizer | None
) -> None:
    """Log, on rank 0, what becomes of the bytes of a model, or that nothing is coded."""
    say_if_nothing_is_coded(hook, group)
    if group.rank() == 0 and not hook.why_uncoded:
        warm_up = optimizer.warmup_steps if isinstance(optimizer, QAdamOptimizer) else 0
        _logger.info("%s", sentence(hook, parameters, group, warm_up))


def facts_of(optimizer: Optimizer | None) -> str:
    """Return what has to be the same of the optimizers of all ranks."""
    if not isinstance(optimizer, QAdamOptimizer):
        return ""
    return f" with QAdamOptimizer(warmup_steps={optimizer.warmup_steps})"


def is_linear(optimizers: Sequence[Optimizer]) -> bool:
    """Whether the steps of all of them are linear in the gradients, as far as their classes tell."""
    return bool(optimizers) and all(isinstance(optimizer, SGD) for optimizer in optimizers)


def scaler_of(optimizer: Any) -> Any:
    """Return the GradScaler of a trainer's wrapper around the optimizer, such as accelerate's, or None."""
    return None if has_step_hooks(optimizer) else getattr(optimizer, "scaler", None)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a trainer's wrapper, such as accelerate's, whose hooks torch would never call."""
    while not has_step_hooks(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def class_of_optimizer(expected: str) -> str:
    """Return the class of optimizer that an algorithm expects, as a user writes it."""
    return "bagua.QAdamOptimizer" if expected == "QAdamOptimizer" else "torch.optim.Optimizer"


def check_optimizer(trained: Mapping[str, Tensor], optimizer: Any, algorithm: str) -> None:
    """Refuse an optimizer that is missing, of another class than the algorithm needs, or not that of the model."""
    expected = describe(algorithm)["optimizer"]
    if optimizer is None:
        if expected:
            raise ValueError(f"algorithm {algorithm!r} acts on what the optimizer does: pass it as optimizer=")
        return
    if expected and not isinstance(optimizer, _OPTIMIZER_CLASSES[expected]):
        raise ValueError(
            f"algorithm {algorithm!r} needs an optimizer of class {class_of_optimizer(expected)}, got "
            f"{type(optimizer).__qualname__}"
        )
    unfit = [base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _UNFIT_OPTIMIZERS]
    if expected and unfit:
        raise ValueError(f"algorithm {algorithm!r} cannot work with {unfit[0]}, {_UNFIT_OPTIMIZERS[unfit[0]]}")
    known = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in trained.items() if p not in known]
    if missing:
        raise ValueError(
            f"the optimizer given to algorithm {algorithm!r} does not hold {len(missing)} of the model's trainable "
            f"parameters ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}): pass the one that trains them"
            + ("" if expected else ", or none, as this algorithm needs none")
        )


def moves_nothing(optimizer: Optimizer) -> bool:
    """Return whether all rates are 0: such a step of torch's checkpoint helpers makes an optimizer's state."""
    return all(bool(group.get("lr") == 0) for group in optimizer.param_groups)


def makes_state_only(optimizer: Optimizer) -> bool:
    """Return whether a step changes no weight and has no gradients, where nobody knows of a backward before it."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return moves_nothing(optimizer) and not any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients)


def check_model(ddp: DistributedDataParallel, algorithm: str, *, is_hierarchical: bool) -> None:
    """Refuse a model whose weights cannot be exchanged, or one that communicates where the algorithm must not."""
    check_weights(trained_by_name(ddp), algorithm)
    info = describe(algorithm)
    if not info["runs_in_background"]:
        return
    reason = _why_nobody_waits(algorithm)
    if (info["steps_may_differ"] or is_hierarchical) and ddp.find_unused_parameters and not ddp.static_graph:
        raise ValueError(f"{reason}, but find_unused_parameters=True communicates in every step: switch it off")
    check_layers(ddp, algorithm)


def check_numbers(trained: Mapping[str, Tensor], algorithm: str) -> None:
    """Refuse complex parameters, which only sums take."""
    found = [name for name, p in trained.items() if p.is_complex()]
    if found and algorithm != "gradient_allreduce":
        raise ValueError(
            f"algorithm {algorithm!r} does not take complex parameters ({', '.join(found[:3])}): choose "
            "'gradient_allreduce', or keep them as torch.view_as_real"
        )


def check_weights(trained: Mapping[str, Tensor], algorithm: str) -> None:
    """Refuse a model on several devices where an algorithm acts on its weights, or keeps residuals."""
    devices = {p.device for p in trained.values()}
    if len(devices) > 1:
        raise ValueError(
            f"algorithm {algorithm!r}, as it is set, takes a model on one device, got {sorted(map(str, devices))}"
        )


def check_layers(model: nn.Module, algorithm: str) -> None:
    """Refuse layers that wait for the other ranks, with an algorithm that runs in the background."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        reason = _why_nobody_waits(algorithm)
        raise ValueError(f"{reason}, but SyncBatchNorm communicates in every forward: use BatchNorm")


def _why_nobody_waits(algorithm: str) -> str:
    if describe(algorithm)["steps_may_differ"]:
        return f"ranks may take different numbers of steps with algorithm {algorithm!r}"
    return f"ranks do not wait for each other in a step with algorithm {algorithm!r}"


# The attachments that are at work.
_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    @eager
    def after_step(optimizer: Optimizer, *_: object) -> None:
        for attachment in list(_attached):
            attachment.note_step_of(optimizer)

    register_optimizer_step_post_hook(after_step)


class Attachment:
    """The hooks on one model and its optimizer, for as long as the algorithm is at work."""

    def __init__(
        self, hook: _C.Hook, ddp: DistributedDataParallel, optimizer: Optimizer, group: dist.ProcessGroup
    ) -> None:
        self._hook = hook
        self._group = group
        # Not the model itself, which holds us.
        self._ddp = weakref.ref(ddp)
        self._parameters = trainable_parameters(ddp)
        self._optimizer = weakref.ref(optimizer)
        self._momentum_optimizer = optimizer if isinstance(optimizer, QAdamOptimizer) else None
        # Since the last forward it may have taken a step, and another one, of this class.
        self._has_stepped = False
        self._other_optimizer = ""
        self._has_warned = False
        self._is_first_forward = True
        self._broadcasts_buffers = ddp.broadcast_buffers
        info = describe(hook.name)
        self._runs_in_background = info["runs_in_background"]
        # Whether backwards without a bucket of DDP's are noticed, and steps that the optimizer did not take.
        self._counts_steps = self._runs_in_background and not info["steps_may_differ"]
        # Whether DDP takes the last synchronised forward for one under no_sync(), so that it copies no gradients; and
        # whether that is still at work.
        self._is_bypassed = self._is_in_bypass = False
        if self._runs_in_background and ddp.broadcast_buffers:
            has_own = any(True for _ in ddp.module.buffers()) and not hook.options.get("average_buffers")
            if has_own and group.rank() == 0:
                _logger.warning(
                    "algorithm %r switches DDP's broadcast_buffers off: each rank keeps running statistics of its own "
                    "until handle.synchronize() or abort(), which give all ranks those of rank 0",
                    hook.name,
                )
            ddp.broadcast_buffers = False
        self._removable: list[Any] = [
            ddp.register_forward_pre_hook(self._before_forward),
            ddp.register_forward_hook(self._after_forward, always_call=True),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if self._counts_steps:
            self._removable.append(register_multi_grad_hook(self._parameters, self._at_backward, mode="any"))
        # The optimizer may train several models, of which each has its own.
        self._attachments: list[Attachment] = vars(optimizer).setdefault("_bagua_attachments", [])
        for former in [one for one in _attached if one._is_replaced_by(ddp, optimizer, self._parameters)]:
            former.detach()
        self._attachments.append(self)
        _watch_optimizers()
        _attached.add(self)

    def _is_replaced_by(self, ddp: DistributedDataParallel, optimizer: Optimizer, parameters: list[Tensor]) -> bool:
        """Whether a model is gone, or this one, wrapped once more for another fit of the same optimizer."""
        own = self._ddp()
        is_same = own is not None and (own.module is ddp.module or not set(parameters).isdisjoint(self._parameters))
        return own is None or (is_same and optimizer is self._optimizer())

    @eager
    def _before_forward(self, ddp: nn.Module, args: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        if is_joining(ddp):
            raise RuntimeError(
                f"join() does not work with algorithm {self._hook.name!r}: ranks that have run out of data would spoil "
                "its state. Give all ranks the same number of steps"
            )
        if not (ddp.training and torch.is_grad_enabled()):
            return
        optimizer, is_synchronised = self._momentum_optimizer, bool(ddp.require_backward_grad_sync)
        momenta = [] if optimizer is None else optimizer.momenta(self._parameters, is_synchronised=is_synchronised)
        if is_synchronised:
            # One that works inside of it, or around it, takes steps as well.
            if self._other_optimizer and not self._has_stepped:
                self._tell_of_other_optimizer()
            self._has_stepped, self._other_optimizer = False, ""
            if self._hook.have_members_changed:
                begin_again(self._hook, self._group, self._parameters[0].device)
                self._is_first_forward = True
            self._check_first_forward()
            self._hook.before_forward(momenta)
            # In the first backward of a static graph DDP would reduce all the same.
            is_local = self._counts_steps and not self._hook.reduces_gradients and not ddp.static_graph
            self._is_bypassed = self._is_in_bypass = is_local
            if is_local:
                ddp.require_backward_grad_sync = False

    @eager
    def _after_forward(self, ddp: nn.Module, args: Any, output: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        if self._is_in_bypass:
            ddp.require_backward_grad_sync = True
            self._is_in_bypass = False
        if ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._hook.after_forward(list(tensors_in(output)))

    def note_step_of(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has taken a step, which may be another one that trains this model."""
        if optimizer is self._optimizer():
            self._has_stepped = True
        elif not self._has_warned and not moves_nothing(optimizer):
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if any(id(parameter) in held for parameter in self._parameters):
                self._other_optimizer = type(optimizer).__qualname__

    def _tell_of_other_optimizer(self) -> None:
        text = (
            f"algorithm {self._hook.name!r} does not see the steps of the {self._other_optimizer} that now trains the "
            "model, as it was registered with another one: call handle.remove(), and register_comm_hook again"
        )
        if self._momentum_optimizer is not None:
            raise RuntimeError(text)
        self._has_warned = True
        _logger.warning("%s", text)

    def _check_first_forward(self) -> None:
        """Find ranks whose optimizers have come differently far, of which some would send momenta and others not."""
        if self._is_first_forward and self._momentum_optimizer is not None:
            steps = f" with an optimizer that has taken {self._momentum_optimizer.steps_done} steps"
            self._hook.agree("", steps, str(self._parameters[0].device))
        self._is_first_forward = False

    @eager
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._hook.is_before_step or not moves_nothing(optimizer):
            self._hook.after_step()

    @eager
    def _at_backward(self, gradient: Tensor) -> None:
        self._hook.at_backward(self._is_bypassed)

    def with_states(self) -> dict[str, Any]:
        """Return what has a state of this rank's own."""
        ddp, optimizer = self._ddp(), self._optimizer()
        assert ddp is not None
        assert optimizer is not None
        return {"module": ddp.module, "optimizer": optimizer}

    def state_loaded(self) -> None:
        """Have the ranks compared again at the next forward."""
        self._is_first_forward = True

    def broadcast_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, as DDP does before a forward. Collective."""
        ddp = self._ddp()
        if ddp is None or not (self._runs_in_background and self._broadcasts_buffers):
            return
        for buffer in synchronised_buffers(ddp):
            broadcast_tensor(buffer, 0, ddp.process_group, buffer.device)

    def detach(self) -> None:
        _attached.discard(self)
        for handle in self._removable:
            handle.remove()
        self._attachments[:] = [one for one in self._attachments if one is not self]

    def remove(self) -> None:
        """Take all hooks off again and leave the model to plain averaging of gradients. Collective."""
        self._hook.count_skipped_step()
        is_before_step = self._hook.is_before_step
        others = {p for one in self._attachments if one is not self for p in one._parameters}
        belongings = Belongings(self._optimizer(), self._parameters, is_before_step=is_before_step, without=others)
        self._hook.leave(belongings.moment, belongings.shapes, belongings.state, belongings.gradients)
        belongings.write_back()
        if self._momentum_optimizer is not None:
            self._momentum_optimizer.take_momenta_back(self._parameters, is_before_step=is_before_step)
        self.detach()
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self._broadcasts_buffers
            ddp.require_forward_param_sync = True
            ddp.register_forward_pre_hook(refuse_uneven_division)

    def __reduce__(self) -> str:
        raise TypeError(PICKLE_ADVICE)
