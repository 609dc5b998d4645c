// SPDX-License-Identifier: Apache-2.0
#include "backend/executor.h"

#if BAGUA_WITH_CUDA
#include "backend/cuda/stream_channel.h"
#endif

namespace bagua {

bool ExecutorProvider::isCapturing([[maybe_unused]] at::Device device) const {
#if BAGUA_WITH_CUDA
  return device.is_cuda() && isCapturingOn(device);
#else
  return false;
#endif
}

}  // namespace bagua
