# SPDX-License-Identifier: Apache-2.0
"""Lets an algorithm work on a module: hooks on its forward, its gradients and its optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bagua._attachment import PICKLE_ADVICE
from bagua._eager import eager
from bagua._executors import background_executors_for, executors_for
from bagua.torch_api._backends import register_backend
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup, _get_default_group
from bagua.torch_api.env import get_default_bucket_size
from bagua.torch_api.scheduler import Scheduler
from bagua.torch_api.state_broadcast import broadcast_optimizer_state, broadcast_tensors
from bagua.torch_api.tensor import as_bagua


class BaguaDistributedDataParallel:
    """An algorithm at work on a module, until `close()`. Collective to make: all ranks, same module, same algorithm.

    Args:
        module: whose trainable parameters are trained, except those named in its attributes
            `_bagua_params_and_buffers_to_ignore` and `_ddp_params_and_buffers_to_ignore`.
        optimizers: all optimizers of these parameters.
        algorithm: what to do.
        process_group: the ranks to work with; by default all.
        bagua_module_name: identifies the module; by default class name and a number.
        gradient_as_bucket_view: whether buckets are flattened.
        find_unused_parameters: accepted for compatibility: a parameter that a backward does not come to counts with a
            gradient of zeros.
        bucket_bytes: when a suggested bucket is full; by default BAGUA_DEFAULT_BUCKET_SIZE.

    Raises:
        ValueError: no trainable parameter, or an optimizer whose state cannot be broadcast.
        NotImplementedError: embeddings with sparse gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup | None = None,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.bagua_module_name = bagua_module_name or f"{type(module).__name__}_{id(module)}"
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group or _get_default_group()
        self.bagua_algorithm: AlgorithmImpl = algorithm.reify(self.process_group)
        self.bagua_buckets: list[BaguaBucket] = []
        self.bagua_train_step_counter = 0
        self.require_backward_grad_sync = True
        self._do_flatten = gradient_as_bucket_view
        self._bucket_bytes = bucket_bytes or get_default_bucket_size()
        self._bagua_backend = Scheduler(self._make_executors)
        register_backend(self.bagua_module_name, self._bagua_backend)
        self._parameters = _trainable(module)
        # Parameters that the backward pass at work has come to.
        self._visited: set[Tensor] = set()
        self._is_in_backward = False
        self._broadcast_state()
        self._init_algorithm(module)
        self._removable = self._install_hooks(module)

    @property
    def module(self) -> nn.Module:
        """The module that the algorithm works on."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"module {self.bagua_module_name!r} does not exist any more")
        return module

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """Return name and parameter of what is trained, in the module's order."""
        return self._parameters

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up locally: no forward and backward inside communicates."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def close(self) -> None:
        """Take all hooks off again; buckets stay in their memory."""
        for handle in self._removable:
            handle.remove()
        self._bagua_backend.close()

    def _make_executors(self, device: torch.device, is_apart: bool) -> Any:
        group = self.process_group.torch_group
        return background_executors_for(group, device) if is_apart else executors_for(group, device)

    def _broadcast_state(self) -> None:
        broadcast_tensors([parameter for _, parameter in self._parameters], self.process_group.torch_group)
        for optimizer in self.bagua_optimizers:
            broadcast_optimizer_state(optimizer, self.process_group.torch_group)

    def _init_algorithm(self, module: nn.Module) -> None:
        """Run the stages of an algorithm, in the order of the original."""
        algorithm = self.bagua_algorithm
        module.bagua_ddp = self  # type: ignore[assignment]
        module.bagua_algorithm = algorithm  # type: ignore[assignment]
        module.bagua_optimizers = self.bagua_optimizers  # type: ignore[assignment]
        module.bagua_train_step_counter = self.bagua_train_step_counter  # type: ignore[assignment]
        module._bagua_backend = self._bagua_backend  # type: ignore[assignment]
        tensors = algorithm.init_tensors(module)
        self.bagua_buckets = algorithm.tensors_to_buckets(self._suggest(tensors), self._do_flatten)
        module.bagua_buckets = self.bagua_buckets  # type: ignore[assignment]
        for bucket in self.bagua_buckets:
            algorithm.init_operations(module, bucket)
        self._bagua_backend.register_ordered_buckets(self.bagua_buckets)
        self._forward_pre_hook = algorithm.init_forward_pre_hook(module)
        self._backward_hook = algorithm.init_backward_hook(module)
        self._post_backward_hook = algorithm.init_post_backward_hook(module)
        self._post_optimizer_step_hook = algorithm.init_post_optimizer_step_hook(module)

    def _suggest(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Put tensors of one dtype and device together until a bucket is full."""
        open_parts: dict[Any, list[Tensor]] = {}
        parts: list[list[Tensor]] = []
        for tensor in tensors:
            part = open_parts.get((tensor.dtype, tensor.device))
            if part is None or sum(t.nbytes for t in part) >= self._bucket_bytes:
                part = open_parts[tensor.dtype, tensor.device] = []
                parts.append(part)
            part.append(tensor)
        return parts

    def _install_hooks(self, module: nn.Module) -> list[RemovableHandle]:
        removable = [module.register_forward_pre_hook(self._before_forward)]
        for name, parameter in self._parameters:
            hook = self._gradient_hook(name)
            removable.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for optimizer in self.bagua_optimizers:
            removable.append(optimizer.register_step_post_hook(self._after_step))
        return removable

    @eager
    def _before_forward(self, module: nn.Module, input: Any) -> None:
        # What a backward that raised, or never came, has left behind.
        self._is_in_backward = False
        self._visited.clear()
        if not module.training:
            return
        self.bagua_train_step_counter += 1
        module.bagua_train_step_counter = self.bagua_train_step_counter  # type: ignore[assignment]
        if self.bagua_algorithm.need_reset():
            self._bagua_backend.wait_pending_comm_ops()
            self._broadcast_state()
            self._init_algorithm(module)
        self._forward_pre_hook(input)

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        @eager
        def hook(parameter: Tensor) -> None:
            if not self.require_backward_grad_sync:
                return
            if not self._is_in_backward:
                self._is_in_backward = True
                self._visited.clear()
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            self._visited.add(parameter)
            self._backward_hook(name, parameter)

        return hook

    def _after_backward(self) -> None:
        if not self._is_in_backward:
            return
        self._is_in_backward = False
        for name, parameter in reversed(self._parameters):
            if parameter not in self._visited:
                if as_bagua(parameter).is_bagua_tensor() and as_bagua(parameter).bagua_getter_closure() is None:
                    as_bagua(parameter).bagua_ensure_grad()
                self._backward_hook(name, parameter)
        self._post_backward_hook()

    @eager
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._post_optimizer_step_hook(optimizer)

    def __reduce__(self) -> str:
        raise TypeError(PICKLE_ADVICE)


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    ignored = {
        *getattr(module, "_bagua_params_and_buffers_to_ignore", ()),
        *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
    }
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise NotImplementedError(
                f"embedding {name!r} has sparse gradients, which no bucket takes: use sparse=False, or "
                "bagua.register_comm_hook with DistributedDataParallel"
            )
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no trainable parameter that is not to be ignored")
    return parameters
