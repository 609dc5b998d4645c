// SPDX-License-Identifier: Apache-2.0
#include "kernels/device_ways.h"

#include <atomic>

namespace bagua {
namespace {

std::atomic<int>& scopes() {
  static std::atomic<int> count{0};
  return count;
}

}  // namespace

bool worksOnCpu(at::Device device) { return device.is_cpu() && scopes().load(std::memory_order_relaxed) == 0; }

AsOnDevice::AsOnDevice() { ++scopes(); }
AsOnDevice::~AsOnDevice() { --scopes(); }

}  // namespace bagua
