# SPDX-License-Identifier: Apache-2.0
"""Mean of the gradients, whose matrices travel as products of two thin factors."""

from bagua.torch_api.algorithms._native import NativeAlgorithm, NativeAlgorithmImpl


class PowerSGDAlgorithmImpl(NativeAlgorithmImpl):
    algorithm = "powersgd"


class PowerSGDAlgorithm(NativeAlgorithm):
    implementation = PowerSGDAlgorithmImpl
