# SPDX-License-Identifier: Apache-2.0
"""Ranks that train on their own and exchange their weights every so many steps: local_sgd and diloco."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from bagua._attachment import check_layers
from bagua._eager import disabled
from bagua._layers import layers_of
from bagua._native import _C
from bagua.handle import OptionArgument
from bagua.torch_api.algorithms._native import BackgroundAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup


class RoundsAlgorithmImpl(BackgroundAlgorithmImpl):
    """local_sgd or diloco at work on a model; see `LocalSGDAlgorithm` and `DiLoCoAlgorithm`."""

    takes_weights = True

    def __init__(self, process_group: BaguaProcessGroup, name: str, **options: OptionArgument) -> None:
        super().__init__(process_group, name, **options)
        self._watch: RemovableHandle | None = None

    def _use_model(self, hook: _C.Hook, bagua_module: Any, parameters: list[Tensor]) -> None:
        check_layers(bagua_module, self._name, _C.algorithm_info(self._name))
        names = [name for name, _ in bagua_module.bagua_build_params()]
        hook.use_model(layers_of(names), list(bagua_module.buffers()))

    def init_backward_hook(self, bagua_module: nn.Module) -> Callable[[str, Tensor], None]:
        """See `AlgorithmImpl`. Before the first gradient of a backward comes, those of a skipped step are gone."""
        if self._watch is not None:
            self._watch.remove()
        # The parameters keep the hook in C++, where the garbage collector does not see the way back to them.
        owner = weakref.ref(self)

        def watch(gradient: Tensor) -> None:
            at_work = owner()
            if at_work is not None:
                at_work.hook.at_backward(False)

        self._watch = register_multi_grad_hook(list(self._position_of), disabled(watch), mode="any")
        return super().init_backward_hook(bagua_module)

    def synchronize(self, bagua_module: Any) -> None:
        """Give all ranks the same weights, and go on. Collective.

        Args:
            bagua_module: the module that `with_bagua` returned, or what wraps it.
        """
        self.hook.synchronize()


class LocalSGDAlgorithm(Algorithm):
    """Ranks train on their own; every `sync_every` steps all take the mean of their weights.

    Call `model.bagua_algorithm.synchronize(model)` on all ranks after training.

    Args:
        sync_every: steps of the optimizer between two averages.
        average_buffers: whether floating-point buffers are averaged with the weights.
    """

    def __init__(self, sync_every: int = 8, average_buffers: bool = False) -> None:
        self.sync_every = sync_every
        self.average_buffers = average_buffers

    def reify(self, process_group: BaguaProcessGroup) -> RoundsAlgorithmImpl:
        """See `Algorithm`."""
        return RoundsAlgorithmImpl(
            process_group, "local_sgd", sync_every=self.sync_every, average_buffers=self.average_buffers
        )


class DiLoCoAlgorithm(Algorithm):
    """Ranks train on their own; an outer optimizer takes what their weights have moved in a round for a gradient.

    Call `model.bagua_algorithm.synchronize(model)` on all ranks after training.

    Args:
        sync_every: steps of the inner optimizer between two synchronisations of a fragment.
        outer_lr: learning rate of the outer optimizer, SGD.
        outer_momentum: its momentum; 0: none.
        nesterov: whether its momentum is Nesterov's.
        fragments: the model is cut into so many, synchronised one after another; `sync_every` is a multiple.
        fragment_pattern: "consecutive" or "strided" layers make a fragment.
        delay: steps between the beginning of a fragment's exchange and its use.
        mixing: what a rank keeps of its own weights when a fragment is synchronised, 0 to 1.
        codec: one of `bagua.available_codecs()` for the differences; None: in full precision.
        error_feedback: what a codec leaves of a difference is added to the next.
        average_buffers: whether floating-point buffers are averaged with the last fragment of a round.
    """

    def __init__(
        self,
        sync_every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        fragment_pattern: str = "consecutive",
        delay: int = 0,
        mixing: float = 0.0,
        codec: str | None = None,
        error_feedback: bool = True,
        average_buffers: bool = False,
    ) -> None:
        self.options: dict[str, OptionArgument] = {
            "sync_every": sync_every,
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "nesterov": nesterov,
            "fragments": fragments,
            "fragment_pattern": fragment_pattern,
            "delay": delay,
            "mixing": mixing,
            "codec": codec,
            "error_feedback": error_feedback,
            "average_buffers": average_buffers,
        }

    def reify(self, process_group: BaguaProcessGroup) -> RoundsAlgorithmImpl:
        """See `Algorithm`."""
        return RoundsAlgorithmImpl(process_group, "diloco", **self.options)
