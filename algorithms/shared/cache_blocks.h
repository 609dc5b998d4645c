// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "kernels/device_ways.h"

namespace bagua {

// Calls visit(begin, length) for blocks of `numel` elements on `device`. On the CPU a chain of element-wise operations
// is bound by memory: block by block, what one writes the next finds in a cache. On a device, blocks are so long that
// the launches do not count, and so short that what a chain makes on its way needs little memory. Every block but the
// last is a multiple of `unit`.
template <typename Visit>
void inBlocks(int64_t numel, at::Device device, Visit&& visit, int64_t unit = 1) {
  const int64_t longest = worksOnCpu(device) ? int64_t{32} << 10 : int64_t{4} << 20;
  const int64_t most = std::max(longest / unit * unit, unit);
  for (int64_t begin = 0; begin < numel; begin += most) visit(begin, std::min(most, numel - begin));
}

}  // namespace bagua
