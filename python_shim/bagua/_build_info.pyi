# SPDX-License-Identifier: Apache-2.0
TORCH_VERSION: str
CUDA_VERSION: str | None
NCCL_VERSION: str | None
CUDA_ARCHS: list[str]
COMPILER: str
BUILD_TYPE: str
