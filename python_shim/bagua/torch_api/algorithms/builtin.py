# SPDX-License-Identifier: Apache-2.0
"""Importing this module puts the built-in algorithms into the registry."""

from __future__ import annotations

from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.torch_api.algorithms.base import GlobalAlgorithmRegistry
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.algorithms.powersgd import PowerSGDAlgorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm
from bagua.torch_api.algorithms.quantized_allreduce import QuantizedAllReduceAlgorithm
from bagua.torch_api.algorithms.rounds import DiLoCoAlgorithm, LocalSGDAlgorithm

_register = GlobalAlgorithmRegistry.register
_register("gradient_allreduce", GradientAllReduceAlgorithm, "Gradient AllReduce Algorithm")
_register("bytegrad", ByteGradAlgorithm, "ByteGrad Algorithm")
_register("decentralized", DecentralizedAlgorithm, "Decentralized SGD Algorithm")
_register(
    "low_precision_decentralized", LowPrecisionDecentralizedAlgorithm, "Low Precision Decentralized SGD Algorithm"
)
_register("qadam", QAdamAlgorithm, "QAdam Algorithm")
_register("quantized_allreduce", QuantizedAllReduceAlgorithm, "Quantized AllReduce Algorithm")
_register("async", AsyncModelAverageAlgorithm, "Asynchronous Model Average Algorithm")
_register("powersgd", PowerSGDAlgorithm, "PowerSGD Algorithm")
_register("local_sgd", LocalSGDAlgorithm, "Local SGD Algorithm")
_register("diloco", DiLoCoAlgorithm, "DiLoCo Algorithm")
