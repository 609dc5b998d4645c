// SPDX-License-Identifier: Apache-2.0
#include "backend/net/outbox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "backend/net/sent_frames.h"

namespace bagua::net {
namespace {

// A message's bytes are counted in 64 bits.
constexpr uint64_t kWholeFrame = kMostPayload;

constexpr uint64_t kGroup = 7;
constexpr uint32_t kFit = kUnsolicitedBytes / kEagerBytes;

class OutboxTest : public ::testing::Test {
 protected:
  std::shared_ptr<Outgoing> add(uint32_t index, uint64_t total, uint64_t group = kGroup) {
    auto message = std::make_shared<Outgoing>();
    message->group = group;
    message->key.index = index;
    message->data = data_.data();
    message->size = total;
    message->ready = total;
    message->context = {static_cast<uint8_t>(index)};
    message->signal = std::make_shared<Signal>();
    outbox_.add(message);
    return message;
  }
  std::optional<OutgoingFrame> next() {
    return outbox_.next([this](uint32_t /*payloadBytes*/) { return cell_; });
  }
  // Everything that leaves by now, as one word per frame: message, offset and kind.
  std::string allThatLeave() {
    std::string all;
    while (auto frame = next()) {
      all += std::to_string(frame->header.key.index) + wordOf(frame->header.kind) + " ";
      Outbox::finish(*frame);
    }
    return all;
  }
  static char wordOf(Frame::Kind kind) {
    if (kind == Frame::Kind::kData) return 'd';
    if (kind == Frame::Kind::kUnsolicited) return 'u';
    return kind == Frame::Kind::kWaiting ? 'w' : 'c';
  }
  // Messages of one frame leave until the account has no room for a byte more.
  void fillAccount() {
    for (uint32_t i = 0; i < kUnsolicitedBytes / kMostPayload; ++i) add(1000 + i, kMostPayload - kFrameCharge);
    EXPECT_EQ(allThatLeave().find('w'), std::string::npos);
  }

  Outbox outbox_;
  // What chooseCell() says.
  std::optional<uint32_t> cell_ = 0;
  // Where all messages lie.
  std::vector<uint8_t> data_ = std::vector<uint8_t>(2 * kEagerBytes);
};

TEST_F(OutboxTest, TheOldestMessageLeavesFirstInFramesOfLimitedSize) {
  const auto first = add(1, 2 * kWholeFrame + 5);
  const auto second = add(2, 3);
  std::vector<uint32_t> sizes;
  while (auto frame = next()) {
    sizes.push_back(frame->header.payloadBytes);
    EXPECT_EQ(frame->message, sizes.size() <= 3 ? first : second);
    EXPECT_EQ(frame->context.size(), frame->header.offset == 0 ? 1 : 0);
    EXPECT_EQ(frame->header.contextBytes, frame->context.size());
    // What is small has been copied.
    EXPECT_EQ(frame->payload() == data_.data() + frame->header.offset, sizes.back() == kMostPayload);
  }
  EXPECT_EQ(sizes, (std::vector<uint32_t>{kMostPayload, kMostPayload, 5, 3}));
}

TEST_F(OutboxTest, AnEmptyMessageIsOneFrame) {
  const auto message = add(1, 0);
  auto frame = next();
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->header.kind, Frame::Kind::kData);
  EXPECT_FALSE(next());
  EXPECT_EQ(Outbox::finish(*frame), message->signal);
  EXPECT_TRUE(message->isComplete());
}

TEST_F(OutboxTest, FramesWithoutAMessageOvertakeMessages) {
  add(1, 10);
  outbox_.addControl({.kind = Frame::Kind::kCredit, .total = 3});
  EXPECT_EQ(allThatLeave(), "0c 1u ");
  EXPECT_TRUE(outbox_.isEmpty());
}

TEST_F(OutboxTest, OnlyWhatIsReadyLeaves) {
  const auto message = add(1, 100);
  message->ready = 0;
  EXPECT_FALSE(next());
  message->ready = 40;
  EXPECT_EQ(outbox_.backlog(), 40);
  EXPECT_EQ(next()->header.payloadBytes, 40);
  EXPECT_EQ(outbox_.backlog(), 0);
  EXPECT_FALSE(next());
  message->ready = 100;
  EXPECT_EQ(next()->header.offset, 40);
}

TEST_F(OutboxTest, OfALargeMessageTheRestWaitsForAPlace) {
  const auto message = add(1, kEagerBytes + 10);
  static_cast<void>(allThatLeave());
  EXPECT_EQ(message->cut, kEagerBytes);
  outbox_.grantPlace(kGroup, message->key, kEagerBytes + 10);
  EXPECT_EQ(allThatLeave(), "1d ");
  EXPECT_TRUE(message->isComplete());
}

TEST_F(OutboxTest, APlaceThatIsAnnouncedBeforeTheMessageIsRemembered) {
  outbox_.grantPlace(kGroup, {.index = 1}, 2 * kEagerBytes);
  const auto message = add(1, 2 * kEagerBytes);
  while (const auto frame = next()) EXPECT_EQ(frame->header.kind, Frame::Kind::kData);
  EXPECT_EQ(message->cut, 2 * kEagerBytes);
}

TEST_F(OutboxTest, WhatHasNoRoomInTheAccountSaysOnceThatItWaits) {
  fillAccount();
  add(100, kMostPayload);
  add(101, kMostPayload);
  EXPECT_EQ(allThatLeave(), "100w 101w ");
  EXPECT_EQ(allThatLeave(), "");
  // Another group has an account of its own.
  add(102, 10, kGroup + 1);
  EXPECT_EQ(allThatLeave(), "102u ");
}

TEST_F(OutboxTest, CreditLetsMessagesGoOnInTheirOrder) {
  fillAccount();
  for (uint32_t i = 100; i < 103; ++i) add(i, kMostPayload);
  EXPECT_EQ(allThatLeave(), "100w 101w 102w ");
  // It reckons with one frame more of each than they turn out to have.
  outbox_.grantCredit(kGroup, 3 * chargeOf(kMostPayload));
  EXPECT_EQ(allThatLeave(), "100u 101u ");
  outbox_.grantCredit(kGroup, chargeOf(kMostPayload));
  EXPECT_EQ(allThatLeave(), "102u ");
}

TEST_F(OutboxTest, WithAllCreditGivenBackTheWholeAccountIsFree) {
  for (int round = 0; round < 10; ++round) {
    const auto message = add(static_cast<uint32_t>(round), kEagerBytes - 7 * static_cast<uint64_t>(round));
    const std::string frames = allThatLeave();
    EXPECT_EQ(frames.find('w'), std::string::npos) << frames;
    const uint64_t count = (message->size + kMostPayload - 1) / kMostPayload;
    outbox_.grantCredit(kGroup, message->size + count * kFrameCharge);
  }
  fillAccount();
  add(100, 1);
  EXPECT_EQ(allThatLeave(), "100w ");
}

TEST_F(OutboxTest, AMessageThatWaitsLeavesUnchargedOnceItHasAPlace) {
  fillAccount();
  const auto first = add(100, kMostPayload);
  const auto second = add(101, kMostPayload);
  EXPECT_EQ(allThatLeave(), "100w 101w ");
  outbox_.grantPlace(kGroup, second->key, kEagerBytes);
  EXPECT_EQ(allThatLeave(), "101d ");
  EXPECT_FALSE(first->isComplete());
}

TEST_F(OutboxTest, AMessageMayLeaveAPartOfTheAccountToOthers) {
  for (uint32_t i = 0; i < kFit; ++i) add(i, kEagerBytes)->maxUnsolicited = kUnsolicitedBytes / 2;
  static_cast<void>(allThatLeave());
  const auto other = add(100, kEagerBytes);
  EXPECT_EQ(allThatLeave().find('w'), std::string::npos);
  EXPECT_TRUE(other->isComplete());
}

TEST_F(OutboxTest, AFrameWaitsForACellAndOthersBehindIt) {
  cell_ = std::nullopt;
  add(1, 10);
  EXPECT_FALSE(next());
  EXPECT_FALSE(outbox_.isEmpty());
  cell_ = 3;
  EXPECT_EQ(next()->header.cell, 3);
}

// Two connections write frames of one message, and the later one is faster.
TEST_F(OutboxTest, BytesThatAnEarlierFrameStillReadsAreNotGone) {
  const auto message = add(1, 3 * kWholeFrame);
  auto first = next();
  auto second = next();
  auto third = next();
  EXPECT_EQ(message->gone(), 0);
  Outbox::finish(*second);
  EXPECT_EQ(message->gone(), 0);
  EXPECT_FALSE(message->hasContextGone());
  Outbox::finish(*first);
  EXPECT_EQ(message->gone(), 2 * kWholeFrame);
  EXPECT_TRUE(message->hasContextGone());
  EXPECT_FALSE(message->isComplete());
  EXPECT_EQ(Outbox::finish(*third), message->signal);
  EXPECT_TRUE(message->isComplete());
}

TEST_F(OutboxTest, OnlyTheLastFrameNotifiesUnlessProgressIsAskedFor) {
  for (const bool tellsProgress : {false, true}) {
    const auto message = add(1, 2 * kWholeFrame);
    message->tellsProgress = tellsProgress;
    auto first = next();
    auto second = next();
    EXPECT_EQ(Outbox::finish(*first), tellsProgress ? message->signal : nullptr);
    EXPECT_EQ(Outbox::finish(*second), message->signal);
  }
}

TEST_F(OutboxTest, ACancelledMessageIsNotCutAnyMoreWhetherItWaitsOrNot) {
  const auto message = add(1, 2 * kWholeFrame);
  static_cast<void>(next());
  outbox_.cancel(message);
  EXPECT_FALSE(next());
  outbox_.grantCredit(kGroup, kUnsolicitedBytes);
  fillAccount();
  const auto waiting = add(100, kMostPayload);
  EXPECT_EQ(allThatLeave(), "100w ");
  outbox_.cancel(waiting);
  outbox_.grantCredit(kGroup, kUnsolicitedBytes);
  EXPECT_EQ(allThatLeave(), "");
}

TEST_F(OutboxTest, AGroupThatIsLeftHasSentSoManyFramesAndSendsNoMore) {
  add(1, 2 * kWholeFrame);
  add(2, 10, kGroup + 1);
  static_cast<void>(next());
  outbox_.grantPlace(kGroup, {.index = 9}, 2 * kEagerBytes);
  EXPECT_EQ(outbox_.leave(kGroup), 1);
  EXPECT_EQ(allThatLeave(), "2u ");
  EXPECT_EQ(outbox_.leave(kGroup), 0);
  EXPECT_EQ(outbox_.leave(kGroup + 1), 1);
  // A thread that has not heard of it yet may still send.
  add(3, 10);
  EXPECT_EQ(allThatLeave(), "");
}

TEST_F(OutboxTest, WhatIsGivenUpNamesTheSignalsOfAllThatWait) {
  fillAccount();
  const auto waiting = add(100, kMostPayload);
  EXPECT_EQ(allThatLeave(), "100w ");
  const auto queued = add(101, kMostPayload, kGroup + 1);
  const auto signals = outbox_.clear();
  EXPECT_EQ(std::set(signals.begin(), signals.end()), (std::set{waiting->signal, queued->signal}));
  EXPECT_TRUE(outbox_.isEmpty());
}

// They have been given to a connection that broke: one had been written, the other not.
TEST_F(OutboxTest, FramesThatAreSentAgainLeaveFirstAndCountOnce) {
  const auto message = add(1, 2 * kWholeFrame);
  add(2, 10);
  std::vector<OutgoingFrame> lost;
  lost.push_back(*next());
  EXPECT_EQ(Outbox::finish(lost.front()), nullptr);
  lost.push_back(*next());
  outbox_.sendAgain(std::move(lost));
  EXPECT_EQ(outbox_.backlog(), 2 * kWholeFrame + 10);
  outbox_.addControl({.kind = Frame::Kind::kCredit});
  auto first = next();
  EXPECT_EQ(first->header.offset, 0);
  EXPECT_EQ(Outbox::finish(*first), nullptr);
  EXPECT_FALSE(message->isComplete());
  auto second = next();
  EXPECT_EQ(second->header.offset, kMostPayload);
  EXPECT_EQ(Outbox::finish(*second), message->signal);
  EXPECT_TRUE(message->isComplete());
  EXPECT_EQ(allThatLeave(), "0c 2u ");
  EXPECT_EQ(outbox_.leave(kGroup), 3) << "data frames are counted where they are cut off";
}

TEST_F(OutboxTest, AFrameReadsItsMessageUntilItsPayloadIsCopied) {
  std::fill(data_.begin(), data_.end(), 1);
  const auto message = add(1, 3 * kWholeFrame);
  auto first = *next();
  std::vector<OutgoingFrame> lost;
  lost.push_back(*next());
  outbox_.sendAgain(std::move(lost));
  EXPECT_EQ(message->reading.size(), 2);
  first.copyPayload(*message, kMostPayload);
  outbox_.copyPayloads(*message, kMostPayload);
  EXPECT_EQ(message->reading.size(), 1);
  std::fill(data_.begin(), data_.end(), 2);
  EXPECT_EQ(first.payload()[kMostPayload - 1], 1);
  const auto second = next();
  EXPECT_EQ(second->payload()[0], 2);
  EXPECT_EQ(second->header.offset, kMostPayload);
}

class SentFramesTest : public OutboxTest {
 protected:
  OutgoingFrame give() {
    sent_.give();
    return *next();
  }
  void write(OutgoingFrame frame) {
    Outbox::finish(frame);
    sent_.keep(std::move(frame));
  }

  SentFrames sent_;
};

TEST_F(SentFramesTest, WhatIsNotAcknowledgedIsSentAgainInItsOrder) {
  const auto message = add(1, 5 * kWholeFrame);
  for (int i = 0; i < 5; ++i) write(give());
  EXPECT_EQ(message->reading.size(), 5);
  EXPECT_TRUE(sent_.acknowledge(2));
  EXPECT_EQ(message->reading.size(), 3);
  EXPECT_FALSE(sent_.isEmpty());
  // The last word.
  EXPECT_TRUE(sent_.acknowledge(3));
  const auto lost = sent_.takeUnreceived();
  ASSERT_EQ(lost.size(), 2);
  EXPECT_EQ(lost[0].header.offset, 3 * kWholeFrame);
  EXPECT_EQ(lost[1].header.offset, 4 * kWholeFrame);
}

TEST_F(SentFramesTest, AnAnswerMayComeBeforeTheWriterKnowsThatTheFrameHasGone) {
  const auto message = add(1, 2 * kWholeFrame);
  auto first = give();
  EXPECT_TRUE(sent_.acknowledge(1));
  write(std::move(first));
  EXPECT_TRUE(sent_.isEmpty());
  EXPECT_EQ(message->reading.size(), 0);
  write(give());
  EXPECT_EQ(sent_.takeUnreceived().size(), 1);
}

TEST_F(SentFramesTest, AnAnswerThatCannotBeIsFound) {
  add(1, 3 * kWholeFrame);
  write(give());
  const auto underWay = give();
  EXPECT_TRUE(sent_.acknowledge(1));
  EXPECT_FALSE(sent_.acknowledge(0)) << "fewer than before";
  EXPECT_FALSE(sent_.acknowledge(3)) << "more than there are";
}

TEST_F(SentFramesTest, TheMemoryOfAMessageIsFreeOnceItsFramesAreCopied) {
  std::fill(data_.begin(), data_.end(), 1);
  const auto message = add(1, 3 * kWholeFrame);
  for (int i = 0; i < 3; ++i) write(give());
  sent_.copyPayloads(*message, kMostPayload + 1);
  EXPECT_EQ(message->reading.size(), 1) << "the third stays in the message";
  std::fill(data_.begin(), data_.end(), 2);
  const auto lost = sent_.takeUnreceived();
  EXPECT_EQ(lost[1].payload()[kMostPayload - 1], 1);
  EXPECT_EQ(lost[2].payload(), data_.data() + 2 * kWholeFrame);
}

}  // namespace
}  // namespace bagua::net
