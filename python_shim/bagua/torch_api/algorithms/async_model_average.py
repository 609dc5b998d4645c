# SPDX-License-Identifier: Apache-2.0
"""Weights averaged in the background. Definition: `async_model_average` of Bagua 0.8."""

from __future__ import annotations

from bagua.torch_api.algorithms._native import BackgroundAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup


class AsyncModelAverageAlgorithmImpl(BackgroundAlgorithmImpl):
    """The algorithm at work on a model; see `AsyncModelAverageAlgorithm`."""

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        peer_selection_mode: str = "all",
        sync_interval_ms: int = 500,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            process_group,
            "async",
            peer_selection_mode=peer_selection_mode,
            sync_interval_ms=sync_interval_ms,
            warmup_steps=warmup_steps,
        )


class AsyncModelAverageAlgorithm(Algorithm):
    """Ranks train on their own and are drawn together in the background.

    Call `model.bagua_algorithm.abort(model)` on all ranks after training.

    Args:
        peer_selection_mode: "all": the average over all ranks.
        sync_interval_ms: milliseconds between the end of a round and the start of the next; greater than 0.
        warmup_steps: steps that average gradients before that.
    """

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0) -> None:
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps

    def reify(self, process_group: BaguaProcessGroup) -> AsyncModelAverageAlgorithmImpl:
        """See `Algorithm`."""
        return AsyncModelAverageAlgorithmImpl(
            process_group, self.peer_selection_mode, self.sync_interval_ms, self.warmup_steps
        )
