# SPDX-License-Identifier: Apache-2.0
"""Mean (or sum) of the gradients in full precision."""

from bagua.torch_api.algorithms._native import NativeAlgorithm, NativeAlgorithmImpl


class GradientAllReduceAlgorithmImpl(NativeAlgorithmImpl):
    algorithm = "gradient_allreduce"
    positional = ("hierarchical", "average")


class GradientAllReduceAlgorithm(NativeAlgorithm):
    implementation = GradientAllReduceAlgorithmImpl
