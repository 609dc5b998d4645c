# SPDX-License-Identifier: Apache-2.0
"""Ranks that train on their own and exchange their weights every so many steps: local_sgd and diloco.

`model.bagua_algorithm.synchronize(model)`, on all ranks, ends the current round with the same weights everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from bagua._torch_private import eager
from bagua.torch_api.algorithms._native import BackgroundAlgorithmImpl, NativeAlgorithm


class _RoundsAlgorithmImpl(BackgroundAlgorithmImpl):
    """An algorithm that works in rounds, which skipped steps belong to."""

    _exchanges_weights = True
    _watch: RemovableHandle | None = None

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

        self._watch = register_multi_grad_hook(list(self._position_of), eager(watch), mode="any")
        return super().init_backward_hook(bagua_module)

    def synchronize(self, bagua_module: Any) -> None:
        """Give all ranks the same weights, and go on. Collective."""
        self.hook.synchronize()


class LocalSGDAlgorithmImpl(_RoundsAlgorithmImpl):
    algorithm = "local_sgd"


class LocalSGDAlgorithm(NativeAlgorithm):
    implementation = LocalSGDAlgorithmImpl


class DiLoCoAlgorithmImpl(_RoundsAlgorithmImpl):
    algorithm = "diloco"


class DiLoCoAlgorithm(NativeAlgorithm):
    implementation = DiLoCoAlgorithmImpl
