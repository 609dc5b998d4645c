# SPDX-License-Identifier: Apache-2.0
"""Importing this module gives torch's classes the methods of the original: see `distributed` and `tensor`."""

from bagua.torch_api import distributed, tensor

distributed.install()
tensor.install()
