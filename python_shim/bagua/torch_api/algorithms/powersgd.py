# SPDX-License-Identifier: Apache-2.0
"""Mean of the gradients, whose matrices travel as products of two thin factors."""

from __future__ import annotations

from bagua.handle import OptionValue
from bagua.torch_api.algorithms._native import NativeAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup


class PowerSGDAlgorithmImpl(NativeAlgorithmImpl):
    """The algorithm at work on a model; see `PowerSGDAlgorithm`."""

    def __init__(self, process_group: BaguaProcessGroup, **options: OptionValue) -> None:
        super().__init__(process_group, "powersgd", **options)


class PowerSGDAlgorithm(Algorithm):
    """Mean of the gradients, whose matrices travel as products of two thin factors.

    Args:
        rank: columns of the factors, and so the rank of what arrives.
        start_step: full precision before this step.
        error_feedback: what the factors leave out is added to the next step's gradient.
        warm_start: each step starts from the factor of the last one; False: from a random one.
        min_compression: a gradient has to be more than this many times larger than its factors, or travels as it is.
        hierarchical: True: on a single host nothing is compressed.
        codec: one of `bagua.available_codecs()`, for the factors; "": full precision.
        seed: of the random factors.
    """

    def __init__(
        self,
        rank: int = 4,
        start_step: int = 1000,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_compression: float = 2.0,
        hierarchical: bool = False,
        codec: str = "",
        seed: int = 0,
    ) -> None:
        self.rank = rank
        self.start_step = start_step
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.min_compression = min_compression
        self.hierarchical = hierarchical
        self.codec = codec
        self.seed = seed

    def reify(self, process_group: BaguaProcessGroup) -> PowerSGDAlgorithmImpl:
        """See `Algorithm`."""
        return PowerSGDAlgorithmImpl(process_group, **vars(self))
