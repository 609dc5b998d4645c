# SPDX-License-Identifier: Apache-2.0
"""Lets an algorithm work on a module: hooks on its forward, its gradients and its optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from bagua._attachment import PICKLE_ADVICE, makes_state_only
from bagua._executors import executors_for, private_executors_for
from bagua._tensors_apart import broadcast_state, broadcast_tensor, tensors_in
from bagua._torch_private import at_end_of_backward, backward_id, eager
from bagua.torch_api._groups import bagua_group
from bagua.torch_api._scheduler import Scheduler
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, some
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.env import get_default_bucket_size
from bagua.torch_api.tensor import as_bagua, backend_of

# What a module has while an algorithm works on it.
_ATTRIBUTES = (
    "bagua_ddp",
    "bagua_algorithm",
    "bagua_optimizers",
    "bagua_train_step_counter",
    "bagua_buckets",
    "_bagua_backend",
    "no_sync",
)


class Engine:
    """An algorithm at work on a module, until `close()`: see `BaguaModule.with_bagua`."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        do_flatten: bool = True,
    ) -> None:
        _check_arguments(optimizers, algorithm)
        # What is trained, in the module's order.
        self.parameters = _trainable(module)
        # Of embeddings with sparse=True.
        self.sparse_parameters = _sparse(module) & {parameter for _, parameter in self.parameters}
        self._removable: list[RemovableHandle] = []
        self.bagua_module_name = cast("str", module.bagua_module_name)
        self.bagua_optimizers = list(optimizers)
        self.process_group = bagua_group(process_group)
        close_engine_of(module)
        self.bagua_algorithm: AlgorithmImpl = algorithm.reify(self.process_group)
        self.bagua_buckets: list[BaguaBucket] = []
        self.bagua_train_step_counter = 0
        self.require_backward_grad_sync = True
        self._do_flatten = do_flatten
        self._bagua_backend = Scheduler(self._make_executors)
        # Parameters that the backward pass at work has come to.
        self._visited: set[Tensor] = set()
        self._is_in_backward = False
        # Whether the last backward has come to its end.
        self._is_complete = True
        try:
            self._broadcast_state(module)
            self._init_algorithm(module)
            self._install_hooks(module)
        except BaseException:
            close_engine_of(module)
            raise

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
        """Take all hooks off again; tensors stay in the memory of their buckets."""
        for handle in self._removable:
            handle.remove()
        self._removable = []
        self._bagua_backend.close()

    def _make_executors(self, device: torch.device, is_apart: bool) -> Any:
        group = self.process_group.torch_group
        return private_executors_for(group, device) if is_apart else executors_for(group, device)

    def _broadcast_state(self, module: nn.Module) -> None:
        # With those that are not trained, which would stay different for ever.
        ignored = _ignored_names(module)
        group = self.process_group.torch_group
        for name, parameter in module.named_parameters():
            if name not in ignored:
                broadcast_tensor(parameter, 0, group, parameter.device)
        for optimizer in self.bagua_optimizers:
            _broadcast_optimizer_state(optimizer, group)

    def _init_algorithm(self, module: nn.Module) -> None:
        """Run the stages of an algorithm, in the order of the original."""
        algorithm = self.bagua_algorithm
        vars(module).update(
            bagua_ddp=self,
            bagua_algorithm=algorithm,
            bagua_optimizers=self.bagua_optimizers,
            bagua_train_step_counter=self.bagua_train_step_counter,
            _bagua_backend=self._bagua_backend,
        )
        tensors = algorithm.init_tensors(module)
        self.bagua_buckets = algorithm.tensors_to_buckets(self._suggest(tensors), self._do_flatten)
        module.bagua_buckets = self.bagua_buckets  # type: ignore[assignment]
        self._check_buckets_hold(tensors)
        for bucket in self.bagua_buckets:
            algorithm.init_operations(module, bucket)
        self._bagua_backend.register_ordered_buckets(self.bagua_buckets)
        self._forward_pre_hook = algorithm.init_forward_pre_hook(module)
        self._backward_hook = algorithm.init_backward_hook(module)
        self._post_backward_hook = algorithm.init_post_backward_hook(module)
        self._post_optimizer_step_hook = algorithm.init_post_optimizer_step_hook(module)

    def _check_buckets_hold(self, tensors: Sequence[Tensor]) -> None:
        held = {tensor for bucket in self.bagua_buckets for tensor in bucket.tensors}
        missing = [as_bagua(tensor).bagua_tensor_name for tensor in tensors if tensor not in held]
        if missing:
            raise ValueError(
                f"tensors_to_buckets() of {type(self.bagua_algorithm).__qualname__} left out {len(missing)} of the "
                f"tensors that init_tensors() returned ({some(missing)}): what must not be communicated must be left "
                "out by init_tensors() already"
            )

    def _suggest(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Put tensors of one dtype and device together until a bucket is full."""
        open_parts: dict[Any, list[Tensor]] = {}
        parts: list[list[Tensor]] = []
        bucket_bytes = get_default_bucket_size()
        for tensor in tensors:
            part = open_parts.get((tensor.dtype, tensor.device))
            if part is None or sum(t.nbytes for t in part) >= bucket_bytes:
                part = open_parts[tensor.dtype, tensor.device] = []
                parts.append(part)
            part.append(tensor)
        return parts

    def _install_hooks(self, module: nn.Module) -> None:
        self._removable.append(module.register_forward_pre_hook(self._before_forward))
        self._removable.append(module.register_forward_hook(self._after_forward))
        for name, parameter in self.parameters:
            hook = _gradient_hook(weakref.ref(self), name)
            self._removable.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for optimizer in self.bagua_optimizers:
            self._removable.append(optimizer.register_step_post_hook(self._after_step))

    @eager
    def _before_forward(self, module: nn.Module, input: Any) -> None:
        if self._is_in_backward and backward_id():
            return  # The backward at work computes the module anew: it is checkpointed as a whole.
        if not self._is_complete:
            self._is_in_backward, self._is_complete = False, True
            self._bagua_backend.start_over()
        self._visited.clear()
        if not module.training:
            return
        self.bagua_train_step_counter += 1
        module.bagua_train_step_counter = self.bagua_train_step_counter  # type: ignore[assignment]
        if self.bagua_algorithm.need_reset():
            self._bagua_backend.wait_pending_comm_ops()
            self._broadcast_state(module)
            self._init_algorithm(module)
        self._forward_pre_hook(input)

    @eager
    def _after_forward(self, module: nn.Module, input: Any, output: Any) -> None:
        # The first gradient to come is that of an output, and belongs to the whole backward. That of a parameter may
        # belong to a backward inside it, of reentrant checkpointing, which ends before the others have come.
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    @eager
    def _begin_backward(self, gradient: Tensor | None = None) -> None:
        if self._is_in_backward or not self.require_backward_grad_sync:
            return
        self._is_in_backward, self._is_complete = True, False
        self._visited.clear()
        at_end_of_backward(self._after_backward)

    def come_to(self, name: str, parameter: Tensor) -> None:
        """Take note that a gradient is complete."""
        if not self.require_backward_grad_sync:
            return
        self._begin_backward()
        if parameter in self._visited:
            raise RuntimeError(
                f"backward has come to parameter {name!r} twice, the second time when its gradient may be on its way "
                "already: it is used by several checkpoints with use_reentrant=True. Use use_reentrant=False"
            )
        self._visited.add(parameter)
        if not self._is_apart(parameter):
            self._backward_hook(name, parameter)

    def _after_backward(self) -> None:
        if not self._is_in_backward:
            return
        self._is_in_backward = False
        if self._visited:  # else it was autograd.grad(), which leaves parameters alone
            self._finish_backward()
        self._is_complete = True

    def _finish_backward(self) -> None:
        for name, parameter in reversed(self.parameters):
            if parameter not in self._visited and not self._is_apart(parameter):
                if as_bagua(parameter).is_bagua_tensor() and as_bagua(parameter).bagua_getter_closure() is None:
                    as_bagua(parameter).bagua_ensure_grad()
                self._backward_hook(name, parameter)
        apart = [parameter for _, parameter in self.parameters if self._is_apart(parameter)]
        if apart:
            # Operations in Python may run beside this thread: only what is over has the same order on every rank.
            self._bagua_backend.wait_pending_comm_ops()
        for parameter in apart:
            self._reduce_sparse(parameter)
        self._post_backward_hook()

    def _is_apart(self, parameter: Tensor) -> bool:
        """Whether its sparse gradient travels by itself. (Its weights may be in a bucket instead.)"""
        return parameter in self.sparse_parameters and backend_of(parameter) is None

    @torch.no_grad()
    def _reduce_sparse(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            # As an embedding's backward makes it, with no rows.
            rows = parameter.new_empty((0, *parameter.shape[1:]))
            indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            parameter.grad = torch.sparse_coo_tensor(indices, rows, parameter.shape, check_invariants=False)
        self.bagua_algorithm.reduce_sparse_gradient(parameter, parameter.grad)

    @eager
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not makes_state_only(optimizer):
            self._post_optimizer_step_hook(optimizer)

    def __reduce__(self) -> str:
        raise TypeError(PICKLE_ADVICE)


def _broadcast_optimizer_state(optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Give an optimizer the state and hyper-parameters of the group's first rank. Collective."""
    if isinstance(optimizer, LBFGS):
        # Its state is not one of its parameters.
        raise ValueError("the state of LBFGS cannot be broadcast: use another optimizer")
    if group.size() == 1:
        return
    device = next((p.device for part in optimizer.param_groups for p in part["params"]), torch.device("cpu"))
    state = broadcast_state(optimizer.state_dict() if group.rank() == 0 else None, 0, group, device)
    if group.rank() != 0:
        optimizer.load_state_dict(state)


def close_engine_of(module: nn.Module) -> None:
    """Let no algorithm work on the module any more."""
    engine: Engine | None = vars(module).get("bagua_ddp")
    if engine is None:
        return
    for name in _ATTRIBUTES:
        vars(module).pop(name, None)
    engine.close()


def _gradient_hook(engine: weakref.ref[Engine], name: str) -> Callable[[Tensor], None]:
    # The parameter keeps its hook in C++, where the garbage collector does not see the way back from the engine to it.
    def hook(parameter: Tensor) -> None:
        at_work = engine()
        if at_work is not None:
            at_work.come_to(name, parameter)

    return eager(hook)


def _check_arguments(optimizers: Any, algorithm: Any) -> None:
    if isinstance(optimizers, Optimizer):
        raise TypeError(f"optimizers must be a list of them, got a {type(optimizers).__qualname__}: write [optimizer]")
    kinds = [type(one).__qualname__ for one in optimizers if not isinstance(one, Optimizer)]
    if kinds:
        raise TypeError(f"optimizers must be a list of torch.optim.Optimizer, got one of {', '.join(kinds)}")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            "algorithm must be an instance of a class derived from bagua.torch_api.algorithms.Algorithm, such as "
            f"Algorithm.init('bytegrad'), got {algorithm!r}"
        )


def _ignored_names(module: nn.Module) -> set[str]:
    return {
        *getattr(module, "_bagua_params_and_buffers_to_ignore", ()),
        *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
    }


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    ignored = _ignored_names(module)
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no trainable parameter that is not to be ignored")
    return parameters


def _sparse(module: nn.Module) -> set[Tensor]:
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return {embedding.weight for embedding in embeddings if embedding.sparse}
