# SPDX-License-Identifier: Apache-2.0
"""The device that tests with ranks are about: BAGUA_TEST_DEVICE, "cpu" or "cuda".

On a rank it is torch's default device, so that a test written with `torch.ones(3)` runs on either. What the test hands
to its ranks is moved there, what they return is moved back. Random numbers that parent and ranks have to agree on are
drawn on the CPU and put `here()`.
"""

import os
from typing import Any, cast

import torch
from torch import Tensor, nn

DEVICE = os.environ.get("BAGUA_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "cuda"):
    raise ValueError(f"BAGUA_TEST_DEVICE is cpu or cuda, got {DEVICE!r}")

# Of limits of time. Ranks that share a GPU take turns on it: each collective takes them some 15 ms.
TIME_FACTOR = {"cpu": 1, "cuda": 4}[DEVICE]
# What torch itself has for tensors of that device.
STOCK_BACKEND = {"cpu": "gloo", "cuda": "nccl"}[DEVICE]


def here(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_device())


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return here(torch.randn(*shape, generator=generator, device="cpu", dtype=dtype))


def settle() -> None:
    """Waits on the host until the device has done all that was enqueued."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def moved(value: Any, device: str) -> Any:
    """A structure of tensors and modules, on another device; anything else in it stays what it is."""
    if isinstance(value, Tensor | nn.Module):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return cast("Any", type(value))(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [moved(part, device) for part in value]
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    return value
