# SPDX-License-Identifier: Apache-2.0
"""Adam whose momentum travels with 8 bits."""

from __future__ import annotations

from bagua.optimizers import QAdamOptimizer
from bagua.torch_api.algorithms._native import MomentumAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


class QAdamAlgorithmImpl(MomentumAlgorithmImpl):
    """The algorithm at work on a model; see `QAdamAlgorithm`."""

    def __init__(
        self, process_group: BaguaProcessGroup, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True
    ) -> None:
        super().__init__(process_group, "qadam", q_adam_optimizer, hierarchical=hierarchical)


class QAdamAlgorithm(Algorithm):
    """Gradients in full precision while the optimizer warms up, then momenta with 8 bits.

    Args:
        q_adam_optimizer: the optimizer that was also given to `with_bagua`.
        hierarchical: after warm-up: full precision inside a host, 8 bits between hosts; False: 8 bits between all
            ranks.
    """

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError(f"QAdamAlgorithm takes a QAdamOptimizer, got {type(q_adam_optimizer).__qualname__}")
        self.optimizer = q_adam_optimizer
        self.hierarchical = hierarchical

    def reify(self, process_group: BaguaProcessGroup) -> QAdamAlgorithmImpl:
        """See `Algorithm`."""
        return QAdamAlgorithmImpl(process_group, self.optimizer, self.hierarchical)
