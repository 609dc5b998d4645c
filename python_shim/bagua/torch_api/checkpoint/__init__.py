# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a training run."""

from bagua.torch_api.checkpoint.checkpointing import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
