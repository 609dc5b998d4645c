# SPDX-License-Identifier: Apache-2.0
"""`module.with_bagua(...)`: the methods that `import bagua.torch_api` adds to `torch.nn.Module`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from bagua.torch_api._engine import Engine
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

if TYPE_CHECKING:
    from bagua.torch_api.communication import BaguaProcessGroup


class BaguaModule:
    """The methods that `import bagua.torch_api` adds to `torch.nn.Module`."""

    def with_bagua(
        self,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        do_flatten: bool = True,
    ) -> nn.Module:
        """Let an algorithm communicate for this module, which is returned. Collective: same module, same algorithm.

        Parameters, also those that are not trained, and the optimizers' state become those of rank 0. Wrapping again
        takes the former algorithm off; where the new one cannot be started, none works on the module any more.
        Gradients are communicated in every backward but inside `module.no_sync()`.

        Args:
            optimizers: all optimizers of the module's parameters.
            algorithm: the recipe, one of `bagua.torch_api.algorithms` or your own.
            process_group: the ranks to work with, a group of Bagua's or of torch's; by default all.
            do_flatten: whether each bucket's tensors are moved into contiguous memory.

        Raises:
            RuntimeError: `init_process_group` has not been called.
            TypeError: something else than optimizers, an algorithm or a group.
            ValueError: no trainable parameter; an optimizer whose state cannot be broadcast; one that is missing and
                that the algorithm needs; buckets that leave out a tensor or hold it twice.

        >>> from bagua.torch_api.algorithms import bytegrad
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model.with_bagua([optimizer], bytegrad.ByteGradAlgorithm()) is model
        True
        >>> model(torch.ones(3, 4)).sum().backward()  # gradients are the mean over the ranks now
        >>> optimizer.step()
        """
        module = cast("nn.Module", self)
        engine = Engine(module, optimizers, algorithm, process_group, do_flatten)
        # In the instance, not the class: trainers look for a method of this name to tell what a model can do, and
        # torch.compile reads all attributes of classes.
        module.no_sync = engine.no_sync  # type: ignore[assignment]
        return module

    @property
    def bagua_module_name(self) -> str:
        """What identifies the module; by default class name and a number. To be set before `with_bagua`."""
        engine = vars(self).get("bagua_ddp")
        default = getattr(self, "_bagua_module_name", f"{type(self).__name__}_{id(self)}")
        return default if engine is None else cast("str", engine.bagua_module_name)

    @bagua_module_name.setter
    def bagua_module_name(self, name: str) -> None:
        self._bagua_module_name = name

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """Return name and parameter of what is trained, in the module's order."""
        engine: Engine | None = vars(self).get("bagua_ddp")
        if engine is None:
            raise AttributeError(f"{type(self).__name__} has not been wrapped by with_bagua()")
        return engine.parameters


def bagua_init(
    module: nn.Module, optimizer: Optimizer, distributed_algorithm: Algorithm | str | None = None, **kwargs: Any
) -> tuple[nn.Module, Optimizer]:
    """`with_bagua` for a module and one optimizer, which it returns, as in Bagua 0.4.

    Args:
        module: see `with_bagua`.
        optimizer: the module's.
        distributed_algorithm: an algorithm or the name of one; by default GradientAllReduceAlgorithm.
        **kwargs: `process_group` and `do_flatten` of `with_bagua`; other options of 0.4 have no counterpart.

    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = bagua_init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> len(model.bagua_buckets)
    1
    """
    unknown = set(kwargs) - {"process_group", "do_flatten"}
    if unknown:
        raise TypeError(
            f"bagua_init() does not know {', '.join(sorted(unknown))}: it takes process_group and do_flatten"
        )
    if isinstance(distributed_algorithm, str):
        distributed_algorithm = Algorithm.init(distributed_algorithm)
    algorithm = distributed_algorithm or GradientAllReduceAlgorithm()
    return cast("BaguaModule", module).with_bagua([optimizer], algorithm, **kwargs), optimizer
