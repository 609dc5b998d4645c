# SPDX-License-Identifier: Apache-2.0
"""What an algorithm written in Python derives from. Definition: `bagua.torch_api.algorithms` of Bagua 0.8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from bagua._registry import describe
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.tensor import as_bagua, backend_of


def some(names: Sequence[str]) -> str:
    """Return the first few of these names, for a message.

    >>> some(["a", "b", "c", "d"])
    "'a', 'b', 'c', ..."
    """
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _gradient_of(parameter: Tensor) -> Tensor | None:
    return parameter.grad


def _set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient


class Algorithm:
    """The base class of algorithms: a recipe, made into an `AlgorithmImpl` for each model."""

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        """Create the instance that will work on a model, with the ranks of this group."""
        raise NotImplementedError(f"{type(self).__qualname__} has to implement reify()")

    # The built-in ones, under the names that `register_comm_hook` knows.
    by_name: ClassVar[dict[str, type[Algorithm]]] = {}

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Create a built-in algorithm by its name, with its options.

        Raises:
            ValueError: no such name; the message lists those there are.
            TypeError: an option that it does not have.

        >>> Algorithm.init("bytegrad", hierarchical=False).hierarchical
        False
        """
        return cls.by_name[describe(name)["name"]](**kwargs)


class AlgorithmImpl:
    """The base class of what works on one model.

    Each `init_*` method is called once when a model is wrapped and once more whenever `need_reset` tells so. What it
    returns is called at its moment of every training step: `init_forward_pre_hook`'s before a forward in training
    mode, `init_backward_hook`'s for every parameter whose gradient is complete (at the end of backward for those that
    the step did not use), `init_post_backward_hook`'s then, `init_post_optimizer_step_hook`'s after an optimizer's
    step. As it is, it gathers gradients in buckets; without operations, see `init_operations`, nothing is communicated.

    Args:
        process_group: the ranks to work with.
    """

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Return True if all `init_*` methods should be called again. Asked before every forward in training mode."""
        return False

    def init_tensors(self, bagua_module: Any) -> list[Tensor]:
        """Return the Bagua tensors to communicate; as it is, the gradients of all parameters, last parameter first.

        Without those of embeddings with `sparse=True`, which no bucket takes: see `reduce_sparse_gradient`.
        """
        tensors: list[Tensor] = []
        for name, parameter in reversed(bagua_module.bagua_build_params()):
            if parameter in bagua_module.bagua_ddp.sparse_parameters:
                continue
            bagua_parameter = as_bagua(parameter).bagua_ensure_grad()
            bagua_parameter.ensure_bagua_tensor(name, bagua_module.bagua_module_name, _gradient_of, _set_gradient)
            tensors.append(parameter)
        return tensors

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Return the buckets to use, in their order.

        Args:
            tensors: what Bagua suggests to put together.
            do_flatten: whether the buckets should be flattened.
        """
        return [BaguaBucket(part, name=str(index), flatten=do_flatten) for index, part in enumerate(tensors)]

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        """Register the operations of one bucket; as it is, none."""

    def init_forward_pre_hook(self, bagua_module: nn.Module) -> Callable[[Any], None]:
        """Return what is called with the model's input before a forward."""
        return lambda input: None

    def init_backward_hook(self, bagua_module: nn.Module) -> Callable[[str, Tensor], None]:
        """Return what is called with name and parameter when a gradient is complete; as it is, marks it ready."""

        def hook(parameter_name: str, parameter: Tensor) -> None:
            if backend_of(parameter) is not None:
                as_bagua(parameter).bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_module: Any) -> Callable[[], None]:
        """Return what is called at the end of backward; as it is, waits for all buckets.

        RuntimeError where tensors were marked ready whose bucket cannot go.
        """

        def hook() -> None:
            bagua_module._bagua_backend.wait_pending_comm_ops()
            bagua_module._bagua_backend.check_none_waits()

        return hook

    def init_post_optimizer_step_hook(self, bagua_module: nn.Module) -> Callable[[Any], None]:
        """Return what is called with the optimizer after its step."""
        return lambda optimizer: None

    def reduce_sparse_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Bring the gradient of an embedding with `sparse=True` together; as it is, the mean. At the end of backward.

        Args:
            parameter: the embedding's weight.
            gradient: its sparse gradient, which the method overwrites.
        """
        group = self.process_group.torch_group
        dist.all_reduce(gradient, group=group)
        gradient.div_(group.size())
