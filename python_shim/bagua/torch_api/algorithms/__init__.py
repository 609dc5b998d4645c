# SPDX-License-Identifier: Apache-2.0
"""Algorithms: those that come with bagua, and what one of your own derives from."""

from bagua.torch_api.algorithms import (
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    powersgd,
    q_adam,
    quantized_allreduce,
    rounds,
)
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "powersgd",
    "q_adam",
    "quantized_allreduce",
    "rounds",
]
