# SPDX-License-Identifier: Apache-2.0
"""Importing this module gives torch's classes the methods of the original: Module and Tensor."""

from bagua.torch_api import distributed, tensor

distributed.install()
tensor.install()
