# SPDX-License-Identifier: Apache-2.0
"""Averages of weights instead of gradients."""

from bagua.torch_api.algorithms._native import NativeAlgorithm, NativeAlgorithmImpl


class DecentralizedAlgorithmImpl(NativeAlgorithmImpl):
    algorithm = "decentralized"
    positional = ("hierarchical", "peer_selection_mode", "communication_interval")
    _exchanges_weights = True


class DecentralizedAlgorithm(NativeAlgorithm):
    implementation = DecentralizedAlgorithmImpl


class LowPrecisionDecentralizedAlgorithmImpl(NativeAlgorithmImpl):
    algorithm = "low_precision_decentralized"
    positional = ("hierarchical", "communication_interval")
    _exchanges_weights = True


class LowPrecisionDecentralizedAlgorithm(NativeAlgorithm):
    implementation = LowPrecisionDecentralizedAlgorithmImpl
