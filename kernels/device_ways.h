// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

// Two ways to compute the same. On the CPU the calling thread reads and writes memory itself, decides by the values
// that it finds there, and goes piece by piece, so that what one loop writes the next one finds in a cache. On a device
// a call only enqueues: the CPU sees no value and waits for nothing, and a launch takes all that there is.
//
// kernels/ and algorithms/ ask here which of the two to go, so that tests can send CPU tensors the way of a device.
// Only what launches CUDA kernels, or names the devices of a tensor to others, asks the tensor itself.
namespace bagua {

// Whether tensors of that device are computed with on the CPU: those of the CPU are.
[[nodiscard]] bool worksOnCpu(at::Device device);
[[nodiscard]] inline bool worksOnCpu(const at::Tensor& tensor) { return worksOnCpu(tensor.device()); }

// For tests: as long as one lives, CPU tensors go the ways of a device, on every thread of the process. Make and
// destroy it while no program runs: one that changes its way halfway is undefined.
class AsOnDevice {
 public:
  AsOnDevice();
  ~AsOnDevice();
  AsOnDevice(const AsOnDevice&) = delete;
  AsOnDevice& operator=(const AsOnDevice&) = delete;
};

}  // namespace bagua
