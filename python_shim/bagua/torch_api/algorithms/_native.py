# SPDX-License-Identifier: Apache-2.0
"""The built-in algorithms as `AlgorithmImpl`s: the same C++ objects that work as hooks of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua._arithmetic import arithmetic_of
from bagua._at_exit import end_with
from bagua._attachment import facts_of, names_and_roles, say_if_nothing_is_coded
from bagua._executors import background_executors_for, executors_for
from bagua._native import _C
from bagua.handle import OptionArgument
from bagua.optimizers import QAdamOptimizer
from bagua.torch_api._checks import some
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.tensor import as_bagua


class _BucketReduction:
    """The bucket operation that hands the gradients to the algorithm."""

    runs_python = False

    def __init__(self, impl: NativeAlgorithmImpl) -> None:
        self._impl = impl

    def start(self, bucket: BaguaBucket, executors: Any) -> dist.Work | None:
        return self._impl.reduce_bucket(bucket)


class NativeAlgorithmImpl(AlgorithmImpl):
    """One of the built-in algorithms at work on a model.

    Args:
        process_group: the ranks to work with.
        name: one of `bagua.available_algorithms()`.
        options: its options.
    """

    # Buckets hold weights, which the algorithm exchanges by itself, and gradients stay local.
    takes_weights = False

    def __init__(self, process_group: BaguaProcessGroup, name: str, **options: OptionArgument) -> None:
        super().__init__(process_group)
        self._name = name
        self._options = _C.check_options(name, options)
        self._runs_in_background = bool(_C.algorithm_info(name)["runs_in_background"])
        self._hook: _C.Hook | None = None
        self._position_of: dict[Tensor, int] = {}
        self._buckets: list[BaguaBucket] = []
        self._stepped: set[int] = set()

    @property
    def hook(self) -> _C.Hook:
        """The algorithm's C++ side; there once a model is wrapped."""
        if self._hook is None:
            raise RuntimeError(f"algorithm {self._name!r} works on no model yet: call with_bagua()")
        return self._hook

    @property
    def runs_in_background(self) -> bool:
        """Whether ranks may take different numbers of steps."""
        return self._runs_in_background

    def init_tensors(self, bagua_module: Any) -> list[Tensor]:
        """See `AlgorithmImpl`. Weights for algorithms that act on them, else gradients. Collective."""
        named = bagua_module.bagua_build_params()
        parameters = [parameter for _, parameter in named]
        self._position_of = {parameter: i for i, parameter in enumerate(parameters)}
        self._check_optimizers(bagua_module)
        self._attach(bagua_module, parameters)
        self._buckets = []
        if not self.takes_weights:
            return super().init_tensors(bagua_module)
        for name, parameter in named:
            as_bagua(parameter).ensure_bagua_tensor(name, bagua_module.bagua_module_name, _itself, _set_data)
        return parameters[::-1]

    def _check_optimizers(self, bagua_module: Any) -> None:
        """Refuse to act on weights whose optimizer nobody has named: its steps would go unseen."""
        if not _C.algorithm_info(self._name)["optimizer"]:
            return
        optimizers = bagua_module.bagua_optimizers
        held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, parameter in bagua_module.bagua_build_params() if parameter not in held]
        if missing:
            raise ValueError(
                f"algorithm {self._name!r} acts on what the optimizers do, but {len(missing)} of the trainable "
                f"parameters ({some(missing)}) are in none of those given: pass all optimizers that train the model"
            )

    def _attach(self, bagua_module: Any, parameters: list[Tensor]) -> None:
        _C.check_names(self._name, self._options, [name for name, _ in bagua_module.named_parameters()])
        group, device = self.process_group.torch_group, parameters[0].device
        executors = executors_for(group, device)
        hook = _C.Hook(self._name, self._options, executors, parameters)
        hook.use_parameters(names_and_roles(bagua_module, parameters))
        self._use_model(hook, bagua_module, parameters)
        # Strides too: elements travel as they lie in memory.
        text = "; ".join(f"{p.dtype}{list(p.shape)}{list(p.stride())}" for p in parameters)
        hook.agree(executors, text, self._facts(), str(device), arithmetic_of(device))
        if self._runs_in_background:
            hook.use_background(background_executors_for(group, device))
            end_with(group, hook)
        if self._hook is None:
            say_if_nothing_is_coded(hook, group)
        self._hook = hook

    def _use_model(self, hook: _C.Hook, bagua_module: Any, parameters: list[Tensor]) -> None:
        """Tell the hook of the model what its algorithm needs to know."""

    def _facts(self) -> str:
        """What has to be the same on all ranks besides the options."""
        return ""

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        """See `AlgorithmImpl`."""
        bucket.clear_ops()
        self._buckets.append(bucket)
        if not self.takes_weights:
            bucket.append_operation(_BucketReduction(self))

    def reduce_bucket(self, bucket: BaguaBucket) -> dist.Work | None:
        """Hand the gradients of one bucket to the algorithm."""
        gradients = [(self._position_of[tensor], bucket.slot_at(i)) for i, tensor in enumerate(bucket.tensors)]
        is_first, is_last = bucket is self._buckets[0], bucket is self._buckets[-1]
        return self.hook.reduce_bucket(bucket.backend_tensor, gradients, is_first, is_last)

    def reduce_sparse_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """See `AlgorithmImpl`. In full precision, whatever the algorithm."""
        if gradient.is_sparse:
            self._finish(self.hook.reduce_bucket(gradient, [], False, False))
            return
        # The embedding's weight is also that of a layer.
        flat = gradient.reshape(-1).clone()
        entry = (self._position_of[parameter], flat.view(gradient.shape))
        self._finish(self.hook.reduce_bucket(flat, [entry], False, False))
        gradient.copy_(flat.view(gradient.shape))

    @staticmethod
    def _finish(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    def init_forward_pre_hook(self, bagua_module: Any) -> Callable[[Any], None]:
        """See `AlgorithmImpl`."""

        def hook(input: Any) -> None:
            if not torch.is_grad_enabled():
                return
            is_synchronised = bagua_module.bagua_ddp.require_backward_grad_sync
            momenta = self._momenta(is_synchronised=is_synchronised)
            if is_synchronised:
                self.hook.before_forward(momenta)

        return hook

    def _momenta(self, *, is_synchronised: bool) -> list[tuple[Tensor, float]]:
        return []

    def init_backward_hook(self, bagua_module: nn.Module) -> Callable[[str, Tensor], None]:
        """See `AlgorithmImpl`. Nothing where gradients stay local."""
        if not self.takes_weights:
            return super().init_backward_hook(bagua_module)

        def hook(parameter_name: str, parameter: Tensor) -> None:
            pass

        return hook

    def init_post_backward_hook(self, bagua_module: Any) -> Callable[[], None]:
        """See `AlgorithmImpl`."""
        wait = super().init_post_backward_hook(bagua_module)

        def hook() -> None:
            wait()
            self.hook.after_backward()

        return hook

    def init_post_optimizer_step_hook(self, bagua_module: Any) -> Callable[[Any], None]:
        """See `AlgorithmImpl`. A step is over when all of the module's optimizers have taken theirs."""

        def hook(optimizer: Any) -> None:
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(bagua_module.bagua_optimizers):
                self._stepped.clear()
                self.hook.after_step()

        return hook


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _set_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value


class BackgroundAlgorithmImpl(NativeAlgorithmImpl):
    """An algorithm that communicates in the background, until it is told to rest."""

    def abort(self, bagua_module: Any) -> None:
        """Stop background communication. Collective; afterwards all ranks hold the same weights.

        Args:
            bagua_module: the module that `with_bagua` returned, or what wraps it.
        """
        self.hook.abort()

    def resume(self, bagua_module: Any) -> None:
        """Let background communication go on after `abort`. For all ranks.

        Args:
            bagua_module: the module that `with_bagua` returned, or what wraps it.
        """
        self.hook.resume()


class MomentumAlgorithmImpl(NativeAlgorithmImpl):
    """An algorithm that takes the momenta of a `QAdamOptimizer`."""

    def __init__(
        self, process_group: BaguaProcessGroup, name: str, optimizer: QAdamOptimizer, **options: OptionArgument
    ) -> None:
        super().__init__(process_group, name, **options)
        self._optimizer = optimizer

    def _check_optimizers(self, bagua_module: Any) -> None:
        super()._check_optimizers(bagua_module)
        if not any(optimizer is self._optimizer for optimizer in bagua_module.bagua_optimizers):
            raise ValueError(
                f"algorithm {self._name!r} was made for a QAdamOptimizer that is none of the module's optimizers: pass "
                "the same one to both"
            )

    def _facts(self) -> str:
        return f"{facts_of(self._optimizer)} that has taken {self._optimizer.steps_done} steps"

    def _momenta(self, *, is_synchronised: bool) -> list[tuple[Tensor, float]]:
        return self._optimizer.momenta(list(self._position_of), is_synchronised=is_synchronised)
