// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device_thread.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

namespace bagua {

void prepareDeviceThread(c10::Device device) {
  c10::cuda::set_device(device.index());
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace bagua
