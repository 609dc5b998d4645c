# SPDX-License-Identifier: Apache-2.0
"""Mean (or sum) of the gradients with 8-bit messages."""

from __future__ import annotations

from bagua.torch_api.algorithms._native import NativeAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup


class ByteGradAlgorithmImpl(NativeAlgorithmImpl):
    """The algorithm at work on a model; see `ByteGradAlgorithm`."""

    def __init__(self, process_group: BaguaProcessGroup, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__(process_group, "bytegrad", hierarchical=hierarchical, average=average)


class ByteGradAlgorithm(Algorithm):
    """Mean (or sum) of the gradients with 8-bit messages.

    Args:
        hierarchical: full precision inside a host, 8 bits between hosts; False: 8 bits between all ranks.
        average: mean over the ranks; False: sum.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: BaguaProcessGroup) -> ByteGradAlgorithmImpl:
        """See `Algorithm`."""
        return ByteGradAlgorithmImpl(process_group, self.hierarchical, self.average)
