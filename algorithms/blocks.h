// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "kernels/device_ways.h"

namespace bagua {

// On the CPU a chain of element-wise operations is bound by memory: block by block, what one writes the next finds in
// cache. Calls visit(begin, length) for blocks of `numel` elements on `device`; elsewhere for all of them at once.
// Every block but the last is a multiple of `unit`.
template <typename Visit>
void inBlocks(int64_t numel, at::Device device, Visit&& visit, int64_t unit = 1) {
  constexpr int64_t kBlock = int64_t{32} << 10;
  const int64_t most = worksOnHost(device) ? std::max(kBlock / unit * unit, unit) : std::max<int64_t>(numel, 1);
  for (int64_t begin = 0; begin < numel; begin += most) visit(begin, std::min(most, numel - begin));
}

}  // namespace bagua
