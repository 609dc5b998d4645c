// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda_device.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

namespace bagua {

const CudaDevice& cudaDevice() {
  static constexpr CudaDevice kDevice = {
      .launchOn = [](const at::Tensor& tensor) -> CudaLaunch {
        const c10::DeviceIndex index = tensor.device().index();
        return {at::cuda::getCurrentCUDAStream(index), at::cuda::getDeviceProperties(index)->multiProcessorCount};
      },
      .check = [](cudaError_t error) { C10_CUDA_CHECK(error); }};
  return kDevice;
}

}  // namespace bagua
