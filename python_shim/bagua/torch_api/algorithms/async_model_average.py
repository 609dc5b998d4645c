# SPDX-License-Identifier: Apache-2.0
"""Weights averaged in the background. Definition: `async_model_average` of Bagua 0.8.

`model.bagua_algorithm.abort(model)`, on all ranks after training, ends the communication; `resume(model)` restarts it.
"""

from bagua.torch_api.algorithms._native import BackgroundAlgorithmImpl, NativeAlgorithm


class AsyncModelAverageAlgorithmImpl(BackgroundAlgorithmImpl):
    algorithm = "async"
    positional = ("peer_selection_mode", "sync_interval_ms", "warmup_steps")


class AsyncModelAverageAlgorithm(NativeAlgorithm):
    implementation = AsyncModelAverageAlgorithmImpl
