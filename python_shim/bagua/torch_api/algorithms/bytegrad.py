# SPDX-License-Identifier: Apache-2.0
"""Mean (or sum) of the gradients with 8-bit messages."""

from bagua.torch_api.algorithms._native import NativeAlgorithm, NativeAlgorithmImpl


class ByteGradAlgorithmImpl(NativeAlgorithmImpl):
    algorithm = "bytegrad"
    positional = ("hierarchical", "average")


class ByteGradAlgorithm(NativeAlgorithm):
    implementation = ByteGradAlgorithmImpl
