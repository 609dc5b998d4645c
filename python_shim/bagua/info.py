# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.info`: what is installed, what was built, and what is missing with the command that mends it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist

import bagua
from bagua import _build_info
from bagua._native import _C


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none usable"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def facts() -> Iterator[tuple[str, str]]:
    """Yield what there is, as (name, value)."""
    yield "bagua", bagua.__version__
    yield "built for torch", _build_info.TORCH_VERSION
    yield "built with CUDA", _build_info.CUDA_VERSION or "no"
    yield "CUDA architectures", ", ".join(_build_info.CUDA_ARCHS) or "none"
    yield "NCCL", _build_info.NCCL_VERSION or "no"
    yield "torch", torch.__version__
    yield "python", platform.python_version()
    yield "GPUs", _gpus()
    yield "transport, CPU tensors", "Gloo" if dist.is_gloo_available() else "none"
    yield "transport, CUDA tensors", "NCCL" if _build_info.CUDA_VERSION else "none"
    yield "host id", _C.local_host_id()
    yield "algorithms", ", ".join(bagua.available_algorithms())


def advice() -> Iterator[str]:
    """Yield what is missing and how to mend it."""
    if not dist.is_gloo_available():
        yield "this torch has no Gloo, which moves CPU tensors: install torch from PyPI"
    if torch.cuda.is_available() and not _build_info.CUDA_VERSION:
        yield "there is a GPU but bagua was built without CUDA: install the CUDA toolkit and type `make setup`"
    if _build_info.CUDA_VERSION and not torch.cuda.is_available():
        yield "bagua was built with CUDA but torch sees no usable GPU: CUDA tensors cannot be communicated here"
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        yield "several hosts: if ranks cannot reach each other, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"


def main() -> None:
    """Print facts and advice."""
    width = max(len(name) for name, _ in facts())
    for name, value in facts():
        print(f"{name:<{width}}  {value}")
    for sentence in advice():
        print(f"note: {sentence}")


if __name__ == "__main__":
    main()
