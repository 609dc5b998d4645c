# SPDX-License-Identifier: Apache-2.0
"""Mean (or sum) of the gradients in full precision."""

from __future__ import annotations

from bagua.torch_api.algorithms._native import NativeAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup


class GradientAllReduceAlgorithmImpl(NativeAlgorithmImpl):
    """The algorithm at work on a model; see `GradientAllReduceAlgorithm`."""

    def __init__(self, process_group: BaguaProcessGroup, hierarchical: bool = False, average: bool = True) -> None:
        super().__init__(process_group, "gradient_allreduce", hierarchical=hierarchical, average=average)


class GradientAllReduceAlgorithm(Algorithm):
    """Mean (or sum) of the gradients in full precision.

    Args:
        hierarchical: accepted for compatibility; a full-precision mean is the same either way.
        average: mean over the ranks; False: sum.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: BaguaProcessGroup) -> GradientAllReduceAlgorithmImpl:
        """See `Algorithm`."""
        return GradientAllReduceAlgorithmImpl(process_group, self.hierarchical, self.average)
