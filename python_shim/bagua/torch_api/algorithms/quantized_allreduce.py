# SPDX-License-Identifier: Apache-2.0
"""Mean (or sum) of the gradients with few bits and error feedback."""

from bagua.torch_api.algorithms._native import NativeAlgorithm, NativeAlgorithmImpl


class QuantizedAllReduceAlgorithmImpl(NativeAlgorithmImpl):
    algorithm = "quantized_allreduce"


class QuantizedAllReduceAlgorithm(NativeAlgorithm):
    implementation = QuantizedAllReduceAlgorithmImpl
