# SPDX-License-Identifier: Apache-2.0
"""Mean (or sum) of the gradients with few bits and error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua.torch_api.algorithms._native import NativeAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup


class QuantizedAllReduceAlgorithm(Algorithm):
    """Mean (or sum) of the gradients with few bits and error feedback.

    Args:
        codec: one of `bagua.available_codecs()`, or a mapping from patterns of parameters' names to codecs.
        error_feedback: whether what coding leaves behind is added to the next step's gradients.
        residuals: "float32", or "8bit": how that is kept.
        exact: what travels uncoded: "1d", "embedding", "head", "small", and patterns of parameters' names.
        rounding: "nearest" or "stochastic".
        hierarchical: full precision inside a host, coded between hosts; False: coded between all ranks.
        average: mean over the ranks; False: sum.
    """

    def __init__(
        self,
        codec: str | Mapping[str, str] = "4bit",
        error_feedback: bool = True,
        residuals: str = "float32",
        exact: str | Sequence[str] = ("1d", "embedding", "small"),
        rounding: str = "nearest",
        hierarchical: bool = True,
        average: bool = True,
    ) -> None:
        self.codec = codec
        self.error_feedback = error_feedback
        self.residuals = residuals
        self.exact = exact
        self.rounding = rounding
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: BaguaProcessGroup) -> NativeAlgorithmImpl:
        """See `Algorithm`."""
        return NativeAlgorithmImpl(
            process_group,
            "quantized_allreduce",
            codec=self.codec,
            error_feedback=self.error_feedback,
            residuals=self.residuals,
            exact=self.exact,
            rounding=self.rounding,
            hierarchical=self.hierarchical,
            average=self.average,
        )
