// SPDX-License-Identifier: Apache-2.0
#include "backend/net/transport.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <thread>
#include <utility>

#include "tests/support/wire_tests.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

// Two processes in this one, and a group of both.
class TransportTest : public ::testing::Test {
 protected:
  void SetUp() override { joinAs(7); }
  void joinAs(uint64_t id, const std::vector<int>& neighbours = {}) {
    const std::vector<ProcessAddress> addresses{first_->address(), second_->address()};
    groups_ = {first_->join(id, 0, addresses, neighbours), second_->join(id, 1, addresses, neighbours)};
  }

  [[nodiscard]] Place at(Bytes& place) const { return {.data = place.data(), .size = place.size(), .signal = signal_}; }
  [[nodiscard]] Group::Message all(const Bytes& sent, const Bytes& context = {}) const {
    return {.data = sent.data(), .size = sent.size(), .ready = sent.size(), .context = context, .signal = signal_};
  }

  std::shared_ptr<Transport> first_ = Transport::listenAt("127.0.0.1", 4);
  std::shared_ptr<Transport> second_ = Transport::listenAt("127.0.0.1", 4);
  std::vector<std::shared_ptr<Group>> groups_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
};

class MessageSize : public TransportTest, public ::testing::WithParamInterface<uint64_t> {};

TEST_P(MessageSize, ArrivesWholeWhoeverComesFirst) {
  const Bytes sent = pattern(GetParam(), 3);
  const Bytes context{1, 2, 3};
  for (const bool receiverFirst : {true, false}) {
    Bytes received(sent.size());
    const uint64_t stream = receiverFirst ? 1 : 2;
    std::unique_ptr<Group::Receiving> receiving;
    const auto expect = [&] { receiving = groups_[1]->receive(0, stream, 0, at(received)); };
    if (receiverFirst) expect();
    const auto sending = groups_[0]->send(1, stream, 0, all(sent, context));
    if (!receiverFirst) {
      std::this_thread::sleep_for(50ms);
      expect();
    }
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
    EXPECT_EQ(receiving->context(), context);
    EXPECT_EQ(received, sent);
    EXPECT_TRUE(comes(*signal_, [&] { return sending->state().isComplete; }));
  }
}

// Before memory is there, while it is, and with more than fits into it at once.
TEST_P(MessageSize, ArrivesWholeThroughMemoryThatBothShare) {
  joinAs(8, {0, 1});
  const Bytes sent = pattern(GetParam(), 3);
  const Bytes context{1, 2, 3};
  for (uint64_t stream = 0; stream < 4; ++stream) {
    const int from = static_cast<int>(stream % 2);
    Bytes received(sent.size());
    const auto sending = groups_[from]->send(1 - from, stream, 0, all(sent, context));
    const auto receiving = groups_[1 - from]->receive(from, stream, 0, at(received));
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
    EXPECT_EQ(receiving->context(), context);
    EXPECT_EQ(received, sent);
    EXPECT_TRUE(comes(*signal_, [&] { return sending->state().isComplete; }));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, MessageSize,
                         ::testing::Values(0, 1, 55, 4096, 65536, 1 << 20, 5 << 20, (40 << 20) + 3));

TEST_F(TransportTest, OfALargeMessageNoMoreThanTheEagerPartLeavesBeforeThereIsAPlace) {
  const Bytes sent = pattern(kEagerBytes + (8U << 20U), 0);
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  std::this_thread::sleep_for(200ms);
  EXPECT_FALSE(sending->state().isComplete);
  Bytes received(sent.size());
  const auto receiving = groups_[1]->receive(0, 1, 0, at(received));
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
  EXPECT_EQ(received, sent);
}

// Messages that nobody has asked for yet, and then receives of them.
class UnaskedTest : public TransportTest {
 protected:
  void send(uint64_t stream, uint32_t index, const Bytes& sent, uint64_t mostUnasked = kUnaskedBytes) {
    auto message = all(sent, {static_cast<uint8_t>(index)});
    message.mostUnasked = mostUnasked;
    sending_.push_back(groups_[0]->send(1, stream, index, std::move(message)));
  }
  // Once nothing more leaves: how many bytes have.
  [[nodiscard]] uint64_t gone() const {
    uint64_t all = 0;
    for (const auto& message : sending_) all += message->state().gone;
    return all;
  }
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

  std::vector<std::unique_ptr<Group::Sending>> sending_;
};

TEST_F(UnaskedTest, OfManyMessagesOnlySoMuchLeavesBeforeTheirReceivesAndAllArriveInAnyOrderOfThese) {
  const Bytes sent = pattern(kEagerBytes, 5);
  for (const bool isInMemory : {false, true}) {
    if (isInMemory) joinAs(8, {0, 1});
    for (uint32_t i = 0; i < 12; ++i) send(1, i, sent);
    EXPECT_LE(goneInTheEnd(), kUnaskedBytes);
    EXPECT_GE(gone(), kUnaskedBytes - uint64_t{2} * kMostPayload);
    for (uint32_t i = 12; i-- > 0;) receiveAndCompare(1, i, sent);
    EXPECT_TRUE(allLeave());
    sending_.clear();
  }
}

TEST_F(UnaskedTest, ManySmallMessagesOfManyStreamsArriveInAnyOrderOfTheirReceives) {
  constexpr uint32_t kStreams = 50;
  constexpr uint32_t kOfEach = 400;
  std::vector<Bytes> sent;
  for (uint32_t i = 0; i < kOfEach; ++i) sent.push_back(pattern(i * 10UL, static_cast<uint8_t>(i)));
  for (uint32_t i = 0; i < kOfEach; ++i) {
    for (uint32_t stream = 0; stream < kStreams; ++stream) send(stream, i, sent[i]);
  }
  EXPECT_LE(goneInTheEnd(), kUnaskedBytes);
  // The last first, and those of a stream in their order and against it.
  for (uint32_t stream = kStreams; stream-- > 0;) {
    for (uint32_t i = 0; i < kOfEach; ++i) {
      const uint32_t index = stream % 2 == 0 ? i : kOfEach - 1 - i;
      ASSERT_NO_FATAL_FAILURE(receiveAndCompare(stream, index, sent[index]));
    }
  }
  EXPECT_TRUE(allLeave());
}

TEST_F(UnaskedTest, WhatIsTakenMakesRoomForMessagesThatNobodyHasAskedForYet) {
  const Bytes sent = pattern(kEagerBytes, 5);
  for (uint32_t i = 0; i < 6; ++i) send(1, i, sent);
  EXPECT_LE(goneInTheEnd(), kUnaskedBytes);
  for (uint32_t i = 0; i < 3; ++i) receiveAndCompare(1, i, sent);
  EXPECT_TRUE(allLeave());
}

TEST_F(UnaskedTest, AMessageThatWaitsIsFoundByWhoTakesFromAnybody) {
  const Bytes sent = pattern(kEagerBytes, 5);
  for (uint32_t i = 0; i < 5; ++i) send(1, i, sent);
  const MessageKey key{.stream = 9, .source = 0, .index = 0};
  EXPECT_FALSE(groups_[1]->firstBegun({key}, signal_));
  send(9, 0, sent);
  ASSERT_TRUE(comes(*signal_, [&] { return groups_[1]->firstBegun({key}, signal_).has_value(); }));
  EXPECT_LE(goneInTheEnd(), kUnaskedBytes);
  receiveAndCompare(9, 0, sent);
}

TEST_F(UnaskedTest, AReceiveThatWasPostedBeforeGetsItsMessageThoughNothingElseIsTaken) {
  const Bytes sent = pattern(kEagerBytes, 5);
  for (const uint64_t size : {uint64_t{100}, kEagerBytes, 2 * kEagerBytes + 5}) {
    const Bytes urgent = pattern(size, 1);
    Bytes received(size);
    const auto receiving = groups_[1]->receive(0, 9, static_cast<uint32_t>(size), at(received));
    for (uint32_t i = 0; i < 5; ++i) send(size, i, sent);
    send(9, static_cast<uint32_t>(size), urgent);
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); })) << size;
    EXPECT_EQ(received, urgent);
  }
  EXPECT_LE(goneInTheEnd(), kUnaskedBytes + 3 * kEagerBytes + 105);
}

TEST_F(UnaskedTest, MessagesThatMayUseAPartOfTheAccountLeaveTheRestToOthers) {
  const Bytes sent = pattern(kEagerBytes, 5);
  for (uint32_t i = 0; i < 6; ++i) send(1, i, sent, kUnaskedBytes / 2);
  EXPECT_LE(goneInTheEnd(), kUnaskedBytes / 2);
  send(2, 0, sent);
  EXPECT_TRUE(comes(*signal_, [&] { return sending_.back()->state().isComplete; }));
}

TEST_F(UnaskedTest, WhatNobodyWillAskForMakesRoom) {
  const Bytes sent = pattern(kEagerBytes, 5);
  for (uint32_t i = 0; i < 12; ++i) send(i % 3, i, sent);
  EXPECT_LE(goneInTheEnd(), kUnaskedBytes);
  // Streams that are over, then a receive that is given up, then a group that was left.
  groups_[1]->retire(0);
  groups_[1]->retire(1);
  Bytes received(kEagerBytes);
  for (uint32_t i = 2; i < 12; i += 3) static_cast<void>(groups_[1]->receive(0, 2, i, at(received)));
  EXPECT_TRUE(allLeave());
  for (uint32_t i = 0; i < 6; ++i) send(3, i, sent);
  EXPECT_LE(goneInTheEnd(), 12 * kEagerBytes + kUnaskedBytes);
  groups_[1].reset();
  for (uint32_t i = 6; i < 12; ++i) send(3, i, sent);
  EXPECT_TRUE(allLeave());
}

TEST_F(UnaskedTest, MessagesThatWaitFailWithTheirLinkAndCanBeGivenUp) {
  const Bytes sent = pattern(kEagerBytes, 5);
  constexpr uint32_t kFit = kUnaskedBytes / kEagerBytes;
  for (uint32_t i = 0; i < kFit + 4; ++i) send(1, i, sent);
  static_cast<void>(goneInTheEnd());
  sending_.erase(sending_.begin() + kFit + 2);
  receiveAndCompare(1, kFit + 3, sent);
  first_->loseLinksForTest();
  EXPECT_TRUE(comes(*signal_, [&] { return !sending_[kFit + 1]->state().error.empty(); }));
}

// Whoever sends by other rules than ours.
TEST(Inbox, APeerThatSendsMoreUnaskedThanItMayIsRefused) {
  class Nobody final : public Answers {
    void tellPlace(uint64_t /*group*/, const MessageKey& /*key*/, uint64_t /*bytes*/) override {}
    void tellCredit(uint64_t /*group*/, uint64_t /*bytes*/) override {}
  };
  const auto nobody = std::make_shared<Nobody>();
  Inbox inbox;
  uint64_t charged = 0;
  Frame frame{.kind = Frame::Kind::kUnasked, .total = kMostPayload, .payloadBytes = kMostPayload};
  for (; charged + chargeOf(kMostPayload) <= kUnaskedBytes; charged += chargeOf(kMostPayload)) {
    ++frame.key.index;
    ASSERT_TRUE(inbox.begin(frame, {}, nobody));
  }
  ++frame.key.index;
  EXPECT_FALSE(inbox.begin(frame, {}, nobody));
}

TEST_F(TransportTest, WhatIsMadeReadyInPiecesArrivesInPieces) {
  const Bytes sent = pattern(1U << 20U, 9);
  Bytes received(sent.size());
  const auto receiving = groups_[1]->receive(0, 1, 0, at(received));
  const auto sending =
      groups_[0]->send(1, 1, 0, {.data = sent.data(), .size = sent.size(), .ready = 1000, .signal = signal_});
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().arrived == 1000; }));
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(receiving->state().arrived, 1000);
  sending->makeReady(sent.size());
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
  EXPECT_EQ(received, sent);
}

TEST_F(TransportTest, ManyMessagesInBothDirectionsAreToldApart) {
  constexpr uint32_t kMessages = 64;
  std::vector<Bytes> sent;
  std::vector<Bytes> received;
  std::vector<std::unique_ptr<Group::Receiving>> receiving;
  std::vector<std::unique_ptr<Group::Sending>> sending;
  for (uint32_t i = 0; i < 2 * kMessages; ++i) {
    sent.push_back(pattern(i * 5000UL, static_cast<uint8_t>(i)));
    received.emplace_back(sent.back().size());
  }
  for (uint32_t i = 0; i < 2 * kMessages; ++i) {
    const int from = static_cast<int>(i % 2);
    sending.push_back(groups_[from]->send(1 - from, i / 8, i, all(sent[i])));
  }
  for (uint32_t i = 2 * kMessages; i-- > 0;) {
    const int from = static_cast<int>(i % 2);
    receiving.push_back(groups_[1 - from]->receive(from, i / 8, i, at(received[i])));
  }
  for (const auto& message : receiving) {
    ASSERT_TRUE(comes(*signal_, [&] { return message->state().isComplete(); }));
  }
  EXPECT_EQ(received, sent);
}

TEST_F(TransportTest, AMessageOfAnotherSizeIsNotWrittenToItsPlace) {
  const Bytes sent = pattern(100, 1);
  Bytes received(50);
  const auto receiving = groups_[1]->receive(0, 1, 0, at(received));
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().total.has_value(); }));
  EXPECT_EQ(receiving->state().total, 100);
  EXPECT_EQ(received, Bytes(50));
}

TEST_F(TransportTest, AMessageThatIsGivenUpDoesNotStopTheOthers) {
  for (const bool isInMemory : {false, true}) {
    if (isInMemory) joinAs(8, {0, 1});
    const Bytes given = pattern(64U << 20U, 1);
    Bytes place(given.size());
    for (uint64_t stream = 0; stream < 6; stream += 2) {
      auto receiving = groups_[1]->receive(0, stream, 0, at(place));
      auto sending = groups_[0]->send(1, stream, 0, all(given));
      // On either side.
      if (stream == 2) {
        sending.reset();
      } else {
        receiving.reset();
      }
      const Bytes sent = pattern(3U << 20U, 1);
      Bytes received(sent.size());
      const auto next = groups_[1]->receive(0, stream + 1, 0, at(received));
      const auto sendingNext = groups_[0]->send(1, stream + 1, 0, all(sent));
      ASSERT_TRUE(comes(*signal_, [&] { return next->state().isComplete(); }));
      EXPECT_EQ(received, sent);
    }
  }
}

TEST_F(TransportTest, APlaceThatIsSmallerThanItsMessageGoesRound) {
  const Bytes sent = pattern((40U << 20U) + 5, 1);
  constexpr uint64_t kRoom = 8U << 20U;
  Bytes ring(kRoom);
  Bytes received;
  const auto receiving =
      groups_[1]->receive(0, 1, 0, {.data = ring.data(), .size = sent.size(), .room = kRoom, .signal = signal_});
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  while (received.size() < sent.size()) {
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().arrived > received.size(); }));
    const uint64_t end = receiving->state().arrived;
    ASSERT_LE(end - received.size(), kRoom);
    for (uint64_t i = received.size(); i < end; ++i) received.push_back(ring[i % kRoom]);
    receiving->use(end);
  }
  EXPECT_EQ(received, sent);
}

TEST_F(TransportTest, NothingIsWrittenWhereTheContextIsNotAccepted) {
  const Bytes sent = pattern(1000, 1);
  Bytes received(1000);
  for (const uint64_t stream : {1, 2}) {
    auto place = at(received);
    place.accepts = [](const Bytes& context) { return context == Bytes{1}; };
    const auto sending = groups_[0]->send(1, stream, 0, all(sent, {static_cast<uint8_t>(stream)}));
    if (stream == 2) std::this_thread::sleep_for(20ms);
    const auto receiving = groups_[1]->receive(0, stream, 0, std::move(place));
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
    EXPECT_EQ(receiving->state().isAccepted, stream == 1);
    EXPECT_EQ(received, stream == 1 ? sent : Bytes(1000));
    received.assign(1000, 0);
  }
}

TEST_F(TransportTest, WhoeverLeavesIsWaitedForNoLongerAndItsLastMessagesArrive) {
  const Bytes sent = pattern(3U << 20U, 1);
  Bytes received(sent.size());
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  ASSERT_TRUE(comes(*signal_, [&] { return sending->state().isComplete; }));
  groups_[0]->leave();
  const auto first = groups_[1]->receive(0, 1, 0, at(received));
  const auto second = groups_[1]->receive(0, 2, 0, at(received));
  ASSERT_TRUE(comes(*signal_, [&] { return first->state().isComplete() && !second->state().error.empty(); }));
  EXPECT_EQ(received, sent);
  EXPECT_NE(second->state().error.find("rank 0 has left the group"), std::string::npos) << second->state().error;
  // Nothing was lost.
  first_->loseLinksForTest();
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(groups_[1]->findLost());
}

TEST_F(TransportTest, ALossIsFoundThoughNobodyWaits) {
  const Bytes sent = pattern(10, 1);
  for (const int from : {0, 1}) {
    const auto sending = groups_[from]->send(1 - from, 1, 0, all(sent));
    ASSERT_TRUE(comes(*signal_, [&] { return sending->state().isComplete; }));
  }
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(groups_[1]->findLost());
  first_->loseLinksForTest();
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (!groups_[1]->findLost() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(groups_[1]->findLost());
  EXPECT_NE(groups_[1]->findLost()->find("(rank 0 at 127.0.0.1)"), std::string::npos) << *groups_[1]->findLost();
}

TEST_F(TransportTest, APeerThatGoesIsNoticedByWhoWaitsForIt) {
  const Bytes sent = pattern(10, 1);
  Bytes received(10);
  const auto first = groups_[1]->receive(0, 1, 0, at(received));
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  ASSERT_TRUE(comes(*signal_, [&] { return first->state().isComplete(); }));
  const auto second = groups_[1]->receive(0, 2, 0, at(received));
  groups_[0].reset();
  first_.reset();
  ASSERT_TRUE(comes(*signal_, [&] { return !second->state().error.empty(); }));
  EXPECT_NE(second->state().error.find("Connection closed by peer"), std::string::npos) << second->state().error;
  // What had arrived stays.
  EXPECT_TRUE(first->state().isComplete());
  const auto late = groups_[1]->receive(0, 3, 0, at(received));
  EXPECT_FALSE(late->state().error.empty());
}

TEST_F(TransportTest, AnotherGroupWorksAfterALoss) {
  const Bytes sent = pattern(10, 1);
  Bytes received(10);
  const auto lost = groups_[1]->receive(0, 1, 0, at(received));
  groups_[0]->send(1, 9, 0, all(sent));
  std::this_thread::sleep_for(50ms);
  first_->loseLinksForTest();
  ASSERT_TRUE(comes(*signal_, [&] { return !lost->state().error.empty(); }));
  joinAs(8);
  const auto receiving = groups_[1]->receive(0, 1, 0, at(received));
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
  EXPECT_EQ(received, sent);
}

// Names of this process's segments.
int segments() {
  const std::string prefix = "bagua-" + std::to_string(getpid()) + "-";
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    count += static_cast<int>(entry.path().filename().string().starts_with(prefix));
  }
  return count;
}

TEST_F(TransportTest, SharedMemoryHasNoNameOnceBothSeeIt) {
  joinAs(8, {0, 1});
  const Bytes sent = pattern(1U << 20U, 3);
  Bytes received(sent.size());
  for (uint64_t stream = 0; stream < 3; ++stream) {
    const auto sending = groups_[0]->send(1, stream, 0, all(sent));
    const auto receiving = groups_[1]->receive(0, stream, 0, at(received));
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
    EXPECT_LE(segments(), stream == 0 ? 1 : 0);
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_EQ(segments(), 0);
}

// Of peers that end and come again, as those of an elastic job do.
TEST_F(TransportTest, MemorySharedWithAPeerThatIsGoneIsFreedThoughItsGroupStays) {
  const Bytes sent = pattern(1U << 20U, 3);
  const auto shared = [] {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      files += std::filesystem::read_symlink(entry.path(), error).string().starts_with("/dev/shm/") ? 1 : 0;
    }
    return files;
  };
  const int before = shared();
  std::vector<std::shared_ptr<Group>> kept;
  for (uint64_t life = 0; life < 20; ++life) {
    joinAs(100 + life, {0, 1});
    kept.push_back(groups_[0]);
    for (uint64_t stream = 0; stream < 3; ++stream) {
      Bytes received(sent.size());
      const auto sending = groups_[0]->send(1, stream, 0, all(sent));
      const auto receiving = groups_[1]->receive(0, stream, 0, at(received));
      ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
      ASSERT_EQ(received, sent);
    }
    // One that this process makes, and one that it opens as the peer.
    EXPECT_GT(shared(), before) << "in life " << life;
    Bytes never(1);
    const auto waiting = groups_[0]->receive(1, 9, 0, at(never));
    second_->loseLinksForTest();
    ASSERT_TRUE(comes(*signal_, [&] { return !waiting->state().error.empty(); }));
    groups_[1].reset();
    second_ = Transport::listenAt("127.0.0.1", 4);
  }
  EXPECT_EQ(shared(), before);
}

TEST(PayloadMemory, CellsThatTheReceiverHasReadAreFreeAndWhoWaitsIsToldOnce) {
  const auto own = PayloadMemory::make();
  ASSERT_TRUE(own);
  EXPECT_FALSE(own->isOpened());
  const auto peers = PayloadMemory::open(own->name());
  ASSERT_TRUE(peers);
  EXPECT_FALSE(PayloadMemory::open(own->name())) << "it has a name still";
  EXPECT_TRUE(own->isOpened());
  std::set<uint32_t> taken;
  for (uint32_t i = 0; i < kPayloadCells; ++i) taken.insert(own->take().value());
  EXPECT_EQ(taken.size(), kPayloadCells);
  own->cell(3)[kMostPayload - 1] = 7;
  EXPECT_EQ(peers->cell(3)[kMostPayload - 1], 7);
  EXPECT_FALSE(peers->release(0)) << "nobody waits yet";
  EXPECT_EQ(own->take(), 0);
  EXPECT_FALSE(own->take());
  int told = 0;
  for (uint32_t i = 0; i < kPayloadCells; ++i) told += static_cast<int>(peers->release(i));
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(own->take());
}

TEST(PayloadMemory, AProcessMakesOnlySoMuchOfIt) {
  std::vector<std::shared_ptr<PayloadMemory>> made;
  while (auto memory = PayloadMemory::make()) made.push_back(std::move(memory));
  EXPECT_EQ(made.size(), 16);
  made.pop_back();
  EXPECT_TRUE(PayloadMemory::make());
}

TEST(PayloadMemory, AWordThatIsNoNameOpensNothing) {
  for (const auto* word : {"", "/", "/bagua-", "/bagua-../../etc/passwd", "/bagua-0123"}) {
    EXPECT_FALSE(PayloadMemory::open(word)) << word;
  }
}

TEST_F(TransportTest, NobodyListensWhereThePeerShouldBe) {
  groups_[1].reset();
  second_.reset();
  const Bytes sent = pattern(10, 1);
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  ASSERT_TRUE(comes(*signal_, [&] { return !sending->state().error.empty(); }));
  EXPECT_NE(sending->state().error.find("cannot connect to 127.0.0.1"), std::string::npos) << sending->state().error;
}

TEST(ProcessAddress, IsReadAsItIsWritten) {
  const ProcessAddress address{{0x12, 0xABCDEF0123456789}, SocketAddress("127.0.0.1", 80)};
  EXPECT_EQ(address.toString(), "0000000000000012abcdef0123456789@127.0.0.1:80");
  const auto read = ProcessAddress::parse(address.toString());
  EXPECT_EQ(read.process, address.process);
  EXPECT_EQ(read.toString(), address.toString());
  const ProcessAddress six{{1, 2}, SocketAddress("fd00::1", 65535)};
  EXPECT_EQ(ProcessAddress::parse(six.toString()).toString(), six.toString());
  for (const auto* wrong : {"", "12@1.2.3.4:5", "0000000000000012abcdef0123456789@1.2.3.4:70000"}) {
    EXPECT_THROW(ProcessAddress::parse(wrong), c10::ValueError) << wrong;
  }
}

}  // namespace
}  // namespace bagua::net
