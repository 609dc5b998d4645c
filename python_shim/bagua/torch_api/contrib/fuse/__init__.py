# SPDX-License-Identifier: Apache-2.0
"""Optimizers that update many parameters as one."""

from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, fuse_step, is_fused_optimizer

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]
