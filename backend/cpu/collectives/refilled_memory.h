// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "backend/cpu/wire.h"
#include "backend/net/frame.h"
#include "backend/os/scratch_memory.h"

namespace bagua {

// What comes from one of `count` ranks, in a part of the scratch memory that is filled again and again.
class RefilledMemory {
 public:
  RefilledMemory(int64_t bytes, int count)
      : memory_(scratchTensor({std::min(bytes, roomOf(count))}, at::kByte)), bytes_(bytes) {}

  [[nodiscard]] Wire::Exchange from(int peer, const at::Tensor& sent) const { return {peer, sent, memory_, bytes_}; }
  // Where byte `begin` of the message lies.
  [[nodiscard]] const void* at(int64_t begin) const {
    return static_cast<const uint8_t*>(memory_.const_data_ptr()) + begin % std::max<int64_t>(memory_.numel(), 1);
  }

 private:
  // Bounds the memory of a reduction (one bucket can be the whole model in the first iteration of DDP). What is on its
  // way fits in: at 1 Gbit/s and 50 ms that is 6 MB, at 5 Gbit/s 31.
  static constexpr int64_t kMost = int64_t{32} << 20;
  static int64_t roomOf(int count) {
    // What a peer sends unasked has to fit.
    constexpr auto kLeast = static_cast<int64_t>(net::kEagerBytes);
    return std::max(kMost / count / Wire::kPieceBytes * Wire::kPieceBytes, kLeast);
  }
  const at::Tensor memory_;
  const int64_t bytes_;
};

}  // namespace bagua
