# SPDX-License-Identifier: Apache-2.0
"""What the bits of sums and products depend on, besides the numbers."""

from __future__ import annotations

import torch


def arithmetic_of(device: torch.device) -> str:
    """Of torch's products on a GPU; ranks for which it is the same get the same bits. Empty on the CPU.

    cuBLAS chooses its kernels by the compute capability and the number of multiprocessors; TF32 rounds the factors. Our
    own products on the CPU give the same bits on every processor.
    """
    if device.type != "cuda":
        return ""
    gpu = torch.cuda.get_device_properties(device)
    return (
        f"compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
        f"torch {torch.__version__}, precision of float32 products "
        f"{torch.backends.cuda.matmul.fp32_precision!r}"
    )
