# SPDX-License-Identifier: Apache-2.0
"""Print what the build must know about the installed torch, as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch


def first(root: Path, patterns: list[str]) -> str:
    """The first existing path among the patterns; wheels of CUDA 12 and 13 are laid out differently."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            return str(path)
    return ""


def nccl_version(include: str) -> str:
    if not include:
        return ""
    text = (Path(include) / "nccl.h").read_text()
    parts = [re.search(rf"#define NCCL_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) for part in parts if part)


def probe() -> dict[str, str]:
    torch_root = Path(torch.__file__).parent
    nvidia = torch_root.parent / "nvidia"
    cuda_version = torch.version.cuda or ""
    cuda = f"cu{cuda_version.split('.')[0]}"
    cuda_header = first(nvidia, [f"{cuda}/include/cuda_runtime_api.h", "cuda_runtime/include/cuda_runtime_api.h"])
    nccl_header = first(nvidia, ["nccl/include/nccl.h"])
    nccl_include = str(Path(nccl_header).parent) if nccl_header else ""
    return {
        "version": torch.__version__,
        "cuda_version": cuda_version,
        "cxx11_abi": str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
        "root": str(torch_root),
        "cudart": first(nvidia, [f"{cuda}/lib/libcudart.so.*", "cuda_runtime/lib/libcudart.so.*"]),
        "cuda_include": str(Path(cuda_header).parent) if cuda_header else "",
        "nccl": first(nvidia, ["nccl/lib/libnccl.so.*"]),
        "nccl_include": nccl_include,
        "nccl_version": nccl_version(nccl_include),
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
