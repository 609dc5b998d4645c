# SPDX-License-Identifier: Apache-2.0
"""Importing this module gives torch's classes the methods of the original: Module, Tensor and ProcessGroup."""

from bagua.torch_api import _groups, distributed, tensor

distributed.install()
tensor.install()
_groups.install()
