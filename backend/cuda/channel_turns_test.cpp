// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/channel_turns.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <utility>

namespace bagua {
namespace {

// Channel, and whether it waits for the other.
using Place = std::pair<size_t, bool>;

class ChannelTurnsTest : public ::testing::Test {
 protected:
  static Place place(ChannelTurns::Turn turn) { return {turn.channel, turn.waitsForOther}; }
  Place overlapping(const at::Tensor& written) { return place(turns_.next(true, MemoryUse({}, {written}))); }
  Place exclusive(const at::Tensor& written) { return place(turns_.next(false, MemoryUse({}, {written}))); }
  Place other() { return overlapping(at::ones({1})); }

  ChannelTurns turns_{2};
  const at::Tensor tensor_ = at::ones({8});
};

TEST_F(ChannelTurnsTest, ProgramsThatMayOverlapTakeTurnsAndDoNotWait) {
  const std::vector<at::Tensor> buckets = {at::ones({8}), at::ones({8}), at::ones({8})};
  EXPECT_EQ(overlapping(buckets[0]), Place(0, false));
  EXPECT_EQ(overlapping(buckets[1]), Place(1, false));
  EXPECT_EQ(overlapping(buckets[2]), Place(0, false));
}

TEST_F(ChannelTurnsTest, OneThatUsesTheMemoryOfAnotherWaitsForIt) {
  EXPECT_EQ(overlapping(tensor_), Place(0, false));
  EXPECT_EQ(overlapping(tensor_.narrow(0, 4, 4)), Place(1, true));
  // On its own channel it comes behind what is there.
  EXPECT_EQ(overlapping(at::ones({8})), Place(0, false));
}

TEST_F(ChannelTurnsTest, OneThatHasWaitedNeedNotWaitAgain) {
  EXPECT_EQ(overlapping(tensor_), Place(0, false));
  EXPECT_EQ(overlapping(tensor_), Place(1, true));
  EXPECT_EQ(overlapping(tensor_), Place(0, true));  // for the second
  EXPECT_EQ(overlapping(tensor_), Place(1, true));  // for the third
  const at::Tensor another = at::ones({8});
  EXPECT_EQ(overlapping(another), Place(0, false));
  EXPECT_EQ(overlapping(tensor_), Place(1, false));  // the third it has waited for, the fourth was here
}

TEST_F(ChannelTurnsTest, BothMayReadTheSameMemory) {
  const std::vector<at::Tensor> read = {tensor_};
  const at::Tensor first = at::ones({1});
  const at::Tensor second = at::ones({1});
  EXPECT_EQ(place(turns_.next(true, MemoryUse(read, {first}))), Place(0, false));
  EXPECT_EQ(place(turns_.next(true, MemoryUse(read, {second}))), Place(1, false));
}

TEST_F(ChannelTurnsTest, OneThatMayNotOverlapComesAfterAllBeforeItAndBeforeAllAfterIt) {
  const std::vector<at::Tensor> buckets = {at::ones({8}), at::ones({8}), at::ones({8}), at::ones({8})};
  EXPECT_EQ(overlapping(buckets[0]), Place(0, false));
  EXPECT_EQ(overlapping(buckets[1]), Place(1, false));
  EXPECT_EQ(exclusive(tensor_), Place(0, true));
  EXPECT_EQ(overlapping(buckets[2]), Place(0, false));  // behind it on its own channel
  EXPECT_EQ(overlapping(buckets[3]), Place(1, true));
}

TEST_F(ChannelTurnsTest, OneThatMayNotOverlapTakesNoTurn) {
  const at::Tensor another = at::ones({8});
  EXPECT_EQ(overlapping(another), Place(0, false));
  EXPECT_EQ(exclusive(tensor_), Place(0, false));
  EXPECT_EQ(overlapping(at::ones({2})), Place(1, true));
}

TEST_F(ChannelTurnsTest, AProgramThatHasNotRunLeavesItsTurnToTheNext) {
  const std::vector<at::Tensor> buckets = {at::ones({8}), at::ones({8})};
  EXPECT_EQ(overlapping(buckets[0]), Place(0, false));
  EXPECT_EQ(overlapping(tensor_), Place(1, false));
  turns_.takeBack(/*mayOverlap=*/true);
  // Nobody knows whether what it was to wait for was enqueued.
  EXPECT_EQ(overlapping(buckets[1]), Place(1, true));
  EXPECT_EQ(exclusive(tensor_), Place(0, true));
  turns_.takeBack(/*mayOverlap=*/false);
  EXPECT_EQ(overlapping(buckets[0]).first, 0);
}

TEST_F(ChannelTurnsTest, ATensorThatDoesNotTellItsMemoryKeepsItsTurnAndRunsAlone) {
  const at::Tensor sparse = at::empty({4}, at::TensorOptions().dtype(at::kFloat).layout(at::kSparse));
  const at::Tensor another = at::ones({8});
  EXPECT_EQ(overlapping(tensor_), Place(0, false));
  EXPECT_EQ(overlapping(sparse), Place(1, true));
  EXPECT_EQ(overlapping(another), Place(0, true));
}

TEST_F(ChannelTurnsTest, ManyThatNobodyHasWaitedForAreNotAllCompared) {
  std::vector<at::Tensor> tensors;
  bool hasWaited = false;
  for (size_t i = 0; i < 4 * ChannelTurns::kMostCompared && !hasWaited; ++i) {
    tensors.push_back(at::ones({8}));
    hasWaited = overlapping(tensors.back()).second;
  }
  EXPECT_TRUE(hasWaited);
}

TEST_F(ChannelTurnsTest, OneChannelNeedsNoTurns) {
  ChannelTurns alone(1);
  EXPECT_EQ(place(alone.next(true, MemoryUse({}, {tensor_}))), Place(0, false));
  EXPECT_EQ(place(alone.next(false, MemoryUse({}, {tensor_}))), Place(0, false));
  EXPECT_EQ(place(alone.next(true, MemoryUse({}, {tensor_}))), Place(0, false));
}

}  // namespace
}  // namespace bagua
