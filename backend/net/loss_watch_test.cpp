// SPDX-License-Identifier: Apache-2.0
#include "backend/net/loss_watch.h"

#include <gtest/gtest.h>

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

// A line of 50 ms that is looked at again and again.
class LossWatchTest : public ::testing::Test {
 protected:
  void send(uint64_t packets, uint64_t lost, std::chrono::microseconds roundTrip = 50ms) {
    line_.sent += packets;
    line_.lost += lost;
    line_.roundTripNow = roundTrip;
    watch_.look(line_, open_, now_ += 1s);
    open_ = std::max(open_, watch_.worth());
  }
  // As many connections as there are in the end.
  int after(int looks, uint64_t packets, uint64_t lost, std::chrono::microseconds roundTrip = 50ms) {
    for (int i = 0; i < looks; ++i) send(packets, lost, roundTrip);
    return open_;
  }

  LossWatch watch_;
  Line line_{.roundTrip = 50ms};
  int open_ = 1;
  LossWatch::Clock::time_point now_;
};

TEST_F(LossWatchTest, FindsALineThatLosesNothingWorthOneConnection) {
  EXPECT_EQ(after(10, 4000, 0), 1);
  EXPECT_FALSE(watch_.hasLoss());
}

TEST_F(LossWatchTest, FindsALossyLineWorthTwiceAsManyConnectionsEachTime) {
  EXPECT_EQ(after(4, 2000, 2), 16);
  EXPECT_TRUE(watch_.hasLoss());
}

TEST_F(LossWatchTest, AddsUpLossesThatAreRare) {
  send(1000, 1);
  EXPECT_EQ(open_, 1);
  send(1000, 1);
  EXPECT_TRUE(watch_.hasLoss());
  EXPECT_EQ(open_, 2);
}

TEST_F(LossWatchTest, ForgetsALossInTenThousand) {
  send(10'000, 1);
  EXPECT_FALSE(watch_.hasLoss());
  EXPECT_EQ(after(10, 10'000, 1), 1);
}

TEST_F(LossWatchTest, SeesThatALineWithAQueueIsFull) { EXPECT_EQ(after(10, 2000, 5, 70ms), 1); }

TEST_F(LossWatchTest, SeesThatWhatIsSentAgainAfterAQueueWasDroppedByIt) {
  for (int i = 0; i < 10; ++i) {
    send(2000, 0, 90ms);
    // The next message begins after a pause, when the queue has long been empty.
    send(100, 20);
  }
  EXPECT_FALSE(watch_.hasLoss());
  send(2000, 5);
  EXPECT_TRUE(watch_.hasLoss());
}

TEST_F(LossWatchTest, SeesThatConnectionsTakeFromEachOther) {
  send(2000, 2);
  ASSERT_EQ(open_, 2);
  // Twice as many lose four times the share.
  EXPECT_EQ(after(10, 2000, 8), 2);
  // The line may be another one some time.
  now_ += 1min;
  send(2000, 2);
  EXPECT_EQ(open_, 4);
}

TEST_F(LossWatchTest, StartsToCountAnewWhereAConnectionHasEnded) {
  send(4000, 3);
  ASSERT_EQ(open_, 2);
  line_ = {.roundTrip = 50ms, .sent = 100, .lost = 0};
  send(0, 0);
  send(1000, 1);
  EXPECT_EQ(open_, 2);
  send(1000, 1);
  EXPECT_EQ(open_, 4);
}

}  // namespace
}  // namespace bagua::net
