// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace bagua {

// Enqueues a kernel on a grid of one dimension, as kernel<<<blocks, threads, 0, stream>>>(arguments...) does. It is
// C++ that every compiler reads, so that tests can run the kernels on the CPU. cudaGetLastError() tells its error.
template <class... Parameters>
void launchKernel(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t stream,
                  std::type_identity_t<Parameters>... arguments) {
  void* pointers[] = {&arguments...};
  cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), pointers, 0, stream);
}

}  // namespace bagua
