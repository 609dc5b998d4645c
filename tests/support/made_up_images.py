# SPDX-License-Identifier: Apache-2.0
"""The four files of Fashion-MNIST with a few images of noise, for examples that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_made_up_images(folder: Path) -> None:
    """Write 32 images to train with, 8 to test with, and their labels."""
    generator = np.random.default_rng(0)
    for part, images in (("train", 32), ("t10k", 8)):
        _write_idx(folder / f"{part}-images-idx3-ubyte", generator.integers(0, 256, (images, 28, 28)))
        _write_idx(folder / f"{part}-labels-idx1-ubyte", generator.integers(0, 10, images))


def _write_idx(path: Path, array: Any) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())
