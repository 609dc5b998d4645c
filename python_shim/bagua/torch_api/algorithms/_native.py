# SPDX-License-Identifier: Apache-2.0
"""The built-in algorithms as `Algorithm`s: the same C++ objects that work as hooks of DistributedDataParallel.

Names, defaults and docstrings of the classes come from the C++ registry, so that they cannot lag behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua._attachment import check_layers, is_linear, names_and_roles, say_if_nothing_is_coded
from bagua._executors import executors_for, start
from bagua._handle import OptionArgument
from bagua._layers import layers_of
from bagua._native import _C
from bagua._registry import OptionInfo, describe
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, some
from bagua.torch_api.bucket import BaguaBucket, Operation
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.tensor import as_bagua


def _options_of(algorithm: str, positional: tuple[str, ...]) -> dict[str, OptionInfo]:
    """Return an algorithm's options, those first that the original's documents give by position, in their order."""
    options = {option["name"]: option for option in describe(algorithm)["options"]}
    return {name: options[name] for name in (*positional, *options)}


class NativeAlgorithmImpl(AlgorithmImpl):
    """One of the built-in algorithms at work on a model. Each of them is a class derived from this one."""

    # What describe() calls it, and the options that may be given by position.
    algorithm: ClassVar[str]
    positional: ClassVar[tuple[str, ...]] = ()
    # Whether the algorithm exchanges weights by itself: buckets then hold weights, and gradients stay local.
    _exchanges_weights: ClassVar[bool] = False

    def __init__(self, process_group: BaguaProcessGroup, *args: OptionArgument, **options: OptionArgument) -> None:
        super().__init__(process_group)
        given = signature_of(type(self)).bind(*args, **options).arguments
        self._options = _C.check_options(self.algorithm, given)
        self._hook: _C.Hook | None = None
        self._position_of: dict[Tensor, int] = {}
        self._buckets: list[BaguaBucket] = []
        self._stepped: set[int] = set()

    @property
    def hook(self) -> _C.Hook:
        """The algorithm's C++ side; there once a model is wrapped."""
        if self._hook is None:
            raise RuntimeError(f"algorithm {self.algorithm!r} works on no model yet: call with_bagua()")
        return self._hook

    @property
    def takes_weights(self) -> bool:
        """Whether buckets hold weights. A `hierarchical` round averages gradients inside the host all the same."""
        return self._exchanges_weights and not self.hook.reduces_gradients

    def init_tensors(self, bagua_module: Any) -> list[Tensor]:
        """See `AlgorithmImpl`. Weights for algorithms that exchange them, else gradients. Collective."""
        named = bagua_module.bagua_build_params()
        parameters = [parameter for _, parameter in named]
        self._position_of = {parameter: i for i, parameter in enumerate(parameters)}
        self._check_optimizers(bagua_module)
        self._attach(bagua_module, named)
        self._buckets = []
        if not self.takes_weights:
            return super().init_tensors(bagua_module)
        for name, parameter in named:
            as_bagua(parameter).ensure_bagua_tensor(name, bagua_module.bagua_module_name)
        return parameters[::-1]

    def _check_optimizers(self, bagua_module: Any) -> None:
        """Refuse to act on weights whose optimizer nobody has named: its steps would go unseen."""
        if not describe(self.algorithm)["optimizer"]:
            return
        optimizers = bagua_module.bagua_optimizers
        held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, parameter in bagua_module.bagua_build_params() if parameter not in held]
        if missing:
            raise ValueError(
                f"algorithm {self.algorithm!r} acts on what the optimizers do, but {len(missing)} of the trainable "
                f"parameters ({some(missing)}) are in none of those given: pass all optimizers that train the model"
            )

    def _attach(self, bagua_module: Any, named: list[tuple[str, nn.Parameter]]) -> None:
        _C.check_names(self.algorithm, self._options, [name for name, _ in bagua_module.named_parameters()])
        if describe(self.algorithm)["runs_in_background"]:
            check_layers(bagua_module, self.algorithm)
        parameters: list[Tensor] = [parameter for _, parameter in named]
        group, device = self.process_group.torch_group, parameters[0].device
        main = executors_for(group, device)
        hook = _C.Hook(self.algorithm, self._options, main, parameters)
        hook.use_parameters(names_and_roles(bagua_module, parameters))
        hook.use_model(layers_of([name for name, _ in named]), list(bagua_module.buffers()))
        hook.use_optimizer(is_linear(bagua_module.bagua_optimizers))
        # Strides too: elements travel as they lie in memory.
        text = "; ".join(f"{p.dtype}{list(p.shape)}{list(p.stride())}" for p in parameters)
        start(hook, group, device, text, self._facts())
        if self._hook is None:
            say_if_nothing_is_coded(hook, group)
        self._hook = hook

    def _facts(self) -> str:
        """What has to be the same on all ranks besides the options."""
        return ""

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        self._buckets.append(bucket)
        if not self.takes_weights:
            bucket.append_operation(Operation(self._reduce_bucket))

    def _reduce_bucket(self, bucket: BaguaBucket, executors: Any) -> dist.Work | None:
        """Hand the gradients of one bucket to the algorithm, which has executors of its own."""
        gradients = [(self._position_of[tensor], bucket.slot_at(i)) for i, tensor in enumerate(bucket.tensors)]
        is_first, is_last = bucket is self._buckets[0], bucket is self._buckets[-1]
        return self.hook.reduce_bucket(bucket.backend_tensor, gradients, is_first, is_last)

    def reduce_sparse_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """See `AlgorithmImpl`. In full precision, whatever the algorithm."""
        if gradient.is_sparse:
            _finish(self.hook.reduce_bucket(gradient, [], False, False))
            return
        # The embedding's weight is also that of a layer.
        flat = gradient.reshape(-1).clone()
        entry = (self._position_of[parameter], flat.view(gradient.shape))
        _finish(self.hook.reduce_bucket(flat, [entry], False, False))
        gradient.copy_(flat.view(gradient.shape))

    def init_forward_pre_hook(self, bagua_module: Any) -> Callable[[Any], None]:
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
        return lambda parameter_name, parameter: None

    def init_post_backward_hook(self, bagua_module: Any) -> Callable[[], None]:
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


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


class BackgroundAlgorithmImpl(NativeAlgorithmImpl):
    """An algorithm that communicates in the background, until it is told to rest.

    Its methods take the module that `with_bagua` returned, or what wraps it, as those of the original.
    """

    def abort(self, bagua_module: Any) -> None:
        """Stop background communication. Collective; afterwards all ranks hold the same weights."""
        self.hook.abort()

    def resume(self, bagua_module: Any) -> None:
        """Let background communication go on after `abort`. For all ranks."""
        self.hook.resume()


class NativeAlgorithm(Algorithm):
    """The recipe of a built-in algorithm. A class derived from it names its `NativeAlgorithmImpl`, and nothing else."""

    implementation: ClassVar[type[NativeAlgorithmImpl]]

    def __init_subclass__(cls) -> None:
        """Give the class the options and the docstring that the registry knows."""
        info = describe(cls.implementation.algorithm)
        options = _options_of(info["name"], cls.implementation.positional).values()
        lines = [f"    {option['name']}: {option['summary']} Default: {option['default']!r}." for option in options]
        cls.__doc__ = "\n".join([info["summary"], "", "Args:", *lines])
        if "__init__" not in vars(cls):
            cls.__signature__ = signature_of(cls.implementation)  # type: ignore[attr-defined]
        cls.by_name[info["name"]] = cls

    def __init__(self, *args: OptionArgument, **options: OptionArgument) -> None:
        bound = signature_of(self.implementation).bind(*args, **options)
        bound.apply_defaults()
        vars(self).update(bound.arguments)

    def reify(self, process_group: BaguaProcessGroup) -> NativeAlgorithmImpl:
        return self.implementation(process_group, **vars(self))


def signature_of(implementation: type[NativeAlgorithmImpl]) -> Signature:
    """Return the options of an algorithm as a call takes them; those of no document are given by name."""
    options = _options_of(implementation.algorithm, implementation.positional).values()
    return Signature(
        [
            Parameter(
                option["name"],
                Parameter.POSITIONAL_OR_KEYWORD
                if option["name"] in implementation.positional
                else Parameter.KEYWORD_ONLY,
                default=option["default"],
            )
            for option in options
        ]
    )
