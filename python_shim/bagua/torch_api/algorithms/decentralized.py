# SPDX-License-Identifier: Apache-2.0
"""Averages of weights instead of gradients."""

from __future__ import annotations

from bagua.torch_api.algorithms._native import NativeAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.communication import BaguaProcessGroup


class DecentralizedAlgorithmImpl(NativeAlgorithmImpl):
    """The algorithm at work on a model; see `DecentralizedAlgorithm`."""

    takes_weights = True

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(
            process_group,
            "decentralized",
            hierarchical=hierarchical,
            peer_selection_mode=peer_selection_mode,
            communication_interval=communication_interval,
        )


class DecentralizedAlgorithm(Algorithm):
    """The average of the weights, exchanged during forward and backward.

    Args:
        hierarchical: hosts are the participants, after an average inside each; False: every rank is one.
        peer_selection_mode: "all": average of all participants; "shift_one": of two, another pair in every exchange.
        communication_interval: exchange in every n-th step.
    """

    def __init__(
        self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1
    ) -> None:
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval

    def reify(self, process_group: BaguaProcessGroup) -> DecentralizedAlgorithmImpl:
        """See `Algorithm`."""
        return DecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.peer_selection_mode, self.communication_interval
        )


class LowPrecisionDecentralizedAlgorithmImpl(NativeAlgorithmImpl):
    """The algorithm at work on a model; see `LowPrecisionDecentralizedAlgorithm`."""

    takes_weights = True

    def __init__(
        self, process_group: BaguaProcessGroup, hierarchical: bool = True, communication_interval: int = 1
    ) -> None:
        super().__init__(
            process_group,
            "low_precision_decentralized",
            hierarchical=hierarchical,
            communication_interval=communication_interval,
        )


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Weights of neighbours in a ring drawn together by 8-bit differences after every step.

    Args:
        hierarchical: a ring of hosts, after an average inside each; False: a ring of ranks.
        communication_interval: exchange after every n-th step.
    """

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval

    def reify(self, process_group: BaguaProcessGroup) -> LowPrecisionDecentralizedAlgorithmImpl:
        """See `Algorithm`."""
        return LowPrecisionDecentralizedAlgorithmImpl(process_group, self.hierarchical, self.communication_interval)
