// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

namespace bagua {

// Where kernels are launched.
struct CudaLaunch {
  cudaStream_t stream;
  int multiprocessors;
};

// What codecs ask of CUDA: tests put the CPU in its place.
struct CudaDevice {
  // For work on this tensor: on the current stream.
  CudaLaunch (*launchOn)(const at::Tensor& tensor);
  // Throws if a launch has failed.
  void (*check)(cudaError_t error);
};

// That of torch.
const CudaDevice& cudaDevice();

}  // namespace bagua
