# SPDX-License-Identifier: Apache-2.0
"""Additions around training: fused optimizers."""

from bagua.torch_api.contrib.fuse import fuse_optimizer

__all__ = ["fuse_optimizer"]
