# SPDX-License-Identifier: Apache-2.0
"""Adam whose momentum travels with 8 bits. The optimizer is the first argument, and also given to `with_bagua`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bagua._attachment import facts_of
from bagua._handle import OptionArgument
from bagua._optimizers import QAdamOptimizer
from bagua.torch_api.algorithms._native import NativeAlgorithm, NativeAlgorithmImpl
from bagua.torch_api.communication import BaguaProcessGroup

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


class QAdamAlgorithmImpl(NativeAlgorithmImpl):
    algorithm = "qadam"
    positional = ("hierarchical",)

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        q_adam_optimizer: QAdamOptimizer,
        *args: OptionArgument,
        **options: OptionArgument,
    ) -> None:
        super().__init__(process_group, *args, **options)
        self._optimizer = q_adam_optimizer

    def _check_optimizers(self, bagua_module: Any) -> None:
        super()._check_optimizers(bagua_module)
        if not any(optimizer is self._optimizer for optimizer in bagua_module.bagua_optimizers):
            raise ValueError(
                f"algorithm {self.algorithm!r} was made for a QAdamOptimizer that is none of the module's optimizers: "
                "pass the same one to both"
            )

    def _facts(self) -> str:
        return f"{facts_of(self._optimizer)} that has taken {self._optimizer.steps_done} steps"

    def _momenta(self, *, is_synchronised: bool) -> list[tuple[Tensor, float]]:
        return self._optimizer.momenta(list(self._position_of), is_synchronised=is_synchronised)


class QAdamAlgorithm(NativeAlgorithm):
    implementation = QAdamAlgorithmImpl

    def __init__(self, q_adam_optimizer: QAdamOptimizer, *args: OptionArgument, **options: OptionArgument) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError(f"QAdamAlgorithm: the first argument must be a QAdamOptimizer, got {q_adam_optimizer!r}")
        super().__init__(*args, **options)
        self.q_adam_optimizer = q_adam_optimizer
