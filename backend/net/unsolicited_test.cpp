// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "backend/net/transport.h"
#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

// Messages that nobody has asked for yet, and then receives of them.
class UnsolicitedMessages : public TwoTransports {
 protected:
  void send(uint64_t stream, uint32_t index, const Bytes& sent, uint64_t maxUnsolicited = kUnsolicitedBytes) {
    auto message = all(sent, {static_cast<uint8_t>(index)});
    message.maxUnsolicited = maxUnsolicited;
    sending_.push_back(groups_[0]->send(1, stream, index, std::move(message)));
  }
  // A message is given up with the test at the latest, and is read until then.
  const Bytes& kept(Bytes bytes) { return memory_.emplace_back(std::move(bytes)); }
  // How many bytes have gone.
  [[nodiscard]] uint64_t gone() const {
    uint64_t all = 0;
    for (const auto& message : sending_) all += message->state().gone;
    return all;
  }
  // How many have once these have, or after long.
  [[nodiscard]] uint64_t goneOnce(uint64_t bytes) const {
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (gone() < bytes && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    return gone();
  }
  // How many have once nothing more leaves.
  [[nodiscard]] uint64_t goneInTheEnd() const {
    uint64_t before = 0;
    while (true) {
      std::this_thread::sleep_for(200ms);
      const uint64_t now = gone();
      if (std::exchange(before, now) == now) return now;
    }
  }
  void receiveAndCompare(uint64_t stream, uint32_t index, const Bytes& sent) {
    Bytes received(sent.size());
    const auto receiving = groups_[1]->receive(0, stream, index, at(received));
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); })) << stream << ", " << index;
    EXPECT_EQ(receiving->context(), Bytes{static_cast<uint8_t>(index)});
    EXPECT_EQ(received, sent);
  }
  [[nodiscard]] bool allLeave() {
    return comes(*signal_, [&] {
      return std::all_of(sending_.begin(), sending_.end(), [](const auto& one) { return one->state().isComplete; });
    });
  }

  std::deque<Bytes> memory_;
  std::vector<std::unique_ptr<Group::Sending>> sending_;
};

TEST_F(UnsolicitedMessages, OfManyMessagesOnlySoMuchLeavesBeforeTheirReceivesAndAllArriveInAnyOrderOfThese) {
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  for (const bool isInMemory : {false, true}) {
    if (isInMemory) joinAs(8, {0, 1});
    for (uint32_t i = 0; i < 12; ++i) send(1, i, sent);
    EXPECT_GE(goneOnce(kUnsolicitedBytes - uint64_t{2} * kMostPayload), kUnsolicitedBytes - uint64_t{2} * kMostPayload);
    EXPECT_LE(goneInTheEnd(), kUnsolicitedBytes);
    for (uint32_t i = 12; i-- > 0;) receiveAndCompare(1, i, sent);
    EXPECT_TRUE(allLeave());
    sending_.clear();
  }
}

TEST_F(UnsolicitedMessages, ManySmallMessagesOfManyStreamsArriveInAnyOrderOfTheirReceives) {
  constexpr uint32_t kStreams = 50;
  constexpr uint32_t kOfEach = 100;
  for (uint32_t i = 0; i < kOfEach; ++i) kept(pattern(i * 170UL, static_cast<uint8_t>(i)));
  for (uint32_t i = 0; i < kOfEach; ++i) {
    for (uint32_t stream = 0; stream < kStreams; ++stream) send(stream, i, memory_[i]);
  }
  EXPECT_LE(goneInTheEnd(), kUnsolicitedBytes);
  // The last first, and those of a stream in their order and against it.
  for (uint32_t stream = kStreams; stream-- > 0;) {
    for (uint32_t i = 0; i < kOfEach; ++i) {
      const uint32_t index = stream % 2 == 0 ? i : kOfEach - 1 - i;
      ASSERT_NO_FATAL_FAILURE(receiveAndCompare(stream, index, memory_[index]));
    }
  }
  EXPECT_TRUE(allLeave());
}

TEST_F(UnsolicitedMessages, WhatIsTakenMakesRoomForMessagesThatNobodyHasAskedForYet) {
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  for (uint32_t i = 0; i < 6; ++i) send(1, i, sent);
  EXPECT_LE(goneInTheEnd(), kUnsolicitedBytes);
  for (uint32_t i = 0; i < 3; ++i) receiveAndCompare(1, i, sent);
  EXPECT_TRUE(allLeave());
}

TEST_F(UnsolicitedMessages, AMessageThatWaitsIsFoundByWhoTakesFromAnybody) {
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  for (uint32_t i = 0; i < 5; ++i) send(1, i, sent);
  const MessageKey key{.stream = 9, .source = 0, .index = 0};
  EXPECT_FALSE(groups_[1]->firstBegun({key}, signal_));
  send(9, 0, sent);
  ASSERT_TRUE(comes(*signal_, [&] { return groups_[1]->firstBegun({key}, signal_).has_value(); }));
  EXPECT_LE(goneInTheEnd(), kUnsolicitedBytes);
  receiveAndCompare(9, 0, sent);
}

TEST_F(UnsolicitedMessages, AReceiveThatWasPostedBeforeGetsItsMessageThoughNothingElseIsTaken) {
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  for (const uint64_t size : {uint64_t{100}, kEagerBytes, 2 * kEagerBytes + 5}) {
    const Bytes& urgent = kept(pattern(size, 1));
    Bytes received(size);
    const auto receiving = groups_[1]->receive(0, 9, static_cast<uint32_t>(size), at(received));
    for (uint32_t i = 0; i < 5; ++i) send(size, i, sent);
    send(9, static_cast<uint32_t>(size), urgent);
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); })) << size;
    EXPECT_EQ(received, urgent);
  }
  EXPECT_LE(goneInTheEnd(), kUnsolicitedBytes + 3 * kEagerBytes + 105);
}

TEST_F(UnsolicitedMessages, MessagesThatMayUseAPartOfTheAccountLeaveTheRestToOthers) {
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  for (uint32_t i = 0; i < 6; ++i) send(1, i, sent, kUnsolicitedBytes / 2);
  EXPECT_LE(goneInTheEnd(), kUnsolicitedBytes / 2);
  send(2, 0, sent);
  EXPECT_TRUE(comes(*signal_, [&] { return sending_.back()->state().isComplete; }));
}

TEST_F(UnsolicitedMessages, WhatNobodyWillAskForMakesRoom) {
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  for (uint32_t i = 0; i < 12; ++i) send(i % 3, i, sent);
  EXPECT_LE(goneInTheEnd(), kUnsolicitedBytes);
  // Streams that are over, then a receive that is given up, then a group that was left.
  groups_[1]->retire(0);
  groups_[1]->retire(1);
  Bytes received(kEagerBytes);
  for (uint32_t i = 2; i < 12; i += 3) static_cast<void>(groups_[1]->receive(0, 2, i, at(received)));
  EXPECT_TRUE(allLeave());
  for (uint32_t i = 0; i < 6; ++i) send(3, i, sent);
  EXPECT_LE(goneInTheEnd(), 12 * kEagerBytes + kUnsolicitedBytes);
  groups_[1].reset();
  for (uint32_t i = 6; i < 12; ++i) send(3, i, sent);
  EXPECT_TRUE(allLeave());
}

TEST_F(UnsolicitedMessages, MessagesThatWaitFailWithTheirLinkAndCanBeGivenUp) {
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  constexpr uint32_t kFit = kUnsolicitedBytes / kEagerBytes;
  for (uint32_t i = 0; i < kFit + 4; ++i) send(1, i, sent);
  // Nothing but its own end wakes who waits for this one.
  const auto own = std::make_shared<Signal>();
  auto message = all(sent);
  message.signal = own;
  const auto waiting = groups_[0]->send(1, 1, kFit + 4, std::move(message));
  static_cast<void>(goneInTheEnd());
  sending_.erase(sending_.begin() + kFit + 2);
  receiveAndCompare(1, kFit + 3, sent);
  EXPECT_EQ(own->count(), 0);
  first_->loseLinksForTest();
  EXPECT_TRUE(comes(*own, [&] { return !waiting->state().error.empty(); }));
  EXPECT_GT(own->count(), 0);
  EXPECT_FALSE(sending_[kFit + 1]->state().error.empty());
}

TEST_F(UnsolicitedMessages, TheAccountIsAsLargeAsEverAfterManyMessagesOfOddSizes) {
  uint32_t index = 0;
  for (int round = 0; round < 10; ++round) {
    std::vector<Bytes> sent;
    const uint32_t first = index;
    // No more than there is room for, in frames whose charge never adds up to what one credit is for.
    while (sent.size() < 7) {
      sent.push_back(pattern(kEagerBytes - 4099 * (sent.size() + 1), static_cast<uint8_t>(index)));
      send(1, index++, sent.back());
    }
    ASSERT_TRUE(allLeave()) << "round " << round;
    for (uint32_t i = first; i < index; ++i) receiveAndCompare(1, i, sent[i - first]);
    sending_.clear();
  }
  const Bytes& sent = kept(pattern(kEagerBytes, 5));
  for (uint32_t i = 0; i < 12; ++i) send(2, i, sent);
  // The receiver keeps back less than kCreditBytes.
  constexpr uint64_t kLeast = kUnsolicitedBytes - kCreditBytes - uint64_t{2} * kMostPayload;
  EXPECT_GE(goneOnce(kLeast), kLeast);
}

}  // namespace
}  // namespace bagua::net
