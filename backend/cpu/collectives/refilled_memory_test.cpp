// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/refilled_memory.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

// A piece that went on at the beginning would be read beyond the end: whoever uses a piece reads it in one go.
TEST(RefilledMemory, HoldsWholePiecesHoweverManyRanksShareIt) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  for (int count = 1; count <= 40; ++count) {
    const RefilledMemory memory(kBytes, count);
    const auto exchange = memory.from(0, Wire::nothing());
    EXPECT_EQ(exchange.received.numel() % Wire::kPieceBytes, 0) << count << " ranks";
    EXPECT_GE(exchange.received.numel(), static_cast<int64_t>(net::kEagerBytes)) << count << " ranks";
    EXPECT_EQ(exchange.incomingBytes(), kBytes);
  }
}

}  // namespace
}  // namespace bagua
