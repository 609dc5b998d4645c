// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/shared_memory/streaming_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace bagua {
namespace {

TEST(StreamingCopy, CopiesEveryByteAtAnyAlignment) {
  constexpr int64_t kRoom = 512;
  std::vector<uint8_t> from(kRoom);
  std::iota(from.begin(), from.end(), uint8_t{1});
  for (int64_t length = 0; length < 300; ++length) {
    for (const int64_t offset : {0, 1, 16, 63}) {
      std::vector<uint8_t> to(kRoom, 0);
      streamingCopy(to.data() + offset, from.data() + 3, length);
      std::vector<uint8_t> expected(kRoom, 0);
      std::copy_n(from.begin() + 3, length, expected.begin() + offset);
      ASSERT_EQ(to, expected) << length << " bytes at " << offset;
    }
  }
}

}  // namespace
}  // namespace bagua
