// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/barrier_device.h"

#include <algorithm>

namespace bagua {

c10::Device barrierDevice(const BarrierPlaces& places) {
  if (places.hasGpu && !places.deviceIds.empty()) {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(places.deviceIds.front())};
  }
  if (places.bound && places.bound->is_cuda()) return *places.bound;
  const auto used = std::ranges::find_if(places.used, [](const c10::Device& device) { return device.is_cuda(); });
  return used == places.used.end() ? c10::Device(c10::kCPU) : *used;
}

}  // namespace bagua
