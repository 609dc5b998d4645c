// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/agreed_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace bagua {
namespace {

using std::chrono::microseconds;

constexpr Wire::Line kFar{.delay = microseconds(25000), .bytesPerSecond = 12'500'000};
constexpr Wire::Line kUnknown{};

AgreedLine::Proposal largestOf(AgreedLine::Proposal a, const AgreedLine::Proposal& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::max(a[i], b[i]);
  return a;
}

TEST(AgreedLine, IsThatOfTheOwnersThatKnowALine) {
  const Halves owners(20);
  AgreedLine agreed;
  const int before = agreed.roundsFor(owners);
  // As of the second of a pair, which speaks with the first alone.
  agreed.agree(largestOf(AgreedLine::proposalOf({}), AgreedLine::proposalOf({kFar, kFar})));
  EXPECT_LT(agreed.roundsFor(owners), before) << "a long delay allows for fewer rounds";
}

TEST(AgreedLine, IsNotThoughtShortForLinesThatAreNotConnected) {
  EXPECT_EQ(AgreedLine::proposalOf({kUnknown, kUnknown, kFar}), AgreedLine::proposalOf({kFar}));
}

TEST(AgreedLine, StaysWhereNobodyKnowsALine) {
  const Halves owners(20);
  AgreedLine agreed;
  const int before = agreed.roundsFor(owners);
  agreed.agree(AgreedLine::proposalOf({kUnknown}));
  EXPECT_EQ(agreed.roundsFor(owners), before);
}

// A line changes in the days that a training takes, and its first call has yet to show what it is like.
TEST(AgreedLine, IsDueInTheSecondCallAndAgainAfterEqualNumbersOfCalls) {
  AgreedLine agreed;
  std::vector<int> due;
  for (int call = 0; call < 100; ++call) {
    if (agreed.isDue()) due.push_back(call);
    agreed.afterCall();
  }
  ASSERT_GE(due.size(), 3U);
  EXPECT_EQ(due[0], 1);
  EXPECT_EQ(due[2] - due[1], due[1] - due[0]);
}

TEST(AgreedLine, TwoHaveEachReduceAHalfWhereThatSavesMoreThanTheSecondDelayCosts) {
  const Halves owners(2);
  const auto isInParts = [&](const AgreedLine& agreed, int64_t bytes) {
    return agreed.wayToReduce(owners, bytes, bytes, true).isInParts;
  };
  AgreedLine near;
  near.agree(AgreedLine::proposalOf({{.delay = microseconds(30), .bytesPerSecond = 1'000'000'000}}));
  EXPECT_FALSE(isInParts(near, 64 << 10));
  EXPECT_TRUE(isInParts(near, 1 << 20));
  AgreedLine far;
  far.agree(AgreedLine::proposalOf({kFar}));
  EXPECT_FALSE(isInParts(far, 64 << 20));
}

// Whole numbers, whatever the processor: no rounding that a compiler may do in another order.
TEST(AgreedLine, FindsAWayForSizesAndRatesWhoseProductIsLarge) {
  AgreedLine agreed;
  agreed.agree(AgreedLine::proposalOf({{.delay = microseconds(1), .bytesPerSecond = int64_t{1} << 40}}));
  const auto way = agreed.wayToReduce(Halves(512), int64_t{1} << 40, int64_t{1} << 41, true);
  EXPECT_TRUE(way.isInParts);
  EXPECT_GE(way.rounds, 1);
}

}  // namespace
}  // namespace bagua
