// SPDX-License-Identifier: Apache-2.0
#include "backend/wire/transport.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

namespace bagua::wire {
namespace {

using namespace std::chrono_literals;

using Bytes = std::vector<uint8_t>;

Bytes pattern(uint64_t size, uint8_t first) {
  Bytes bytes(size);
  std::iota(bytes.begin(), bytes.end(), first);
  return bytes;
}

template <class Condition>
bool comes(Signal& signal, const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (true) {
    const uint64_t count = signal.count();
    if (condition()) return true;
    if (!signal.waitPast(count, deadline)) return false;
  }
}

// Two processes in this one, and a group of both.
class TransportTest : public ::testing::Test {
 protected:
  void SetUp() override { joinAs(7); }
  void joinAs(uint64_t id) {
    const std::vector<ProcessAddress> addresses{first_->address(), second_->address()};
    groups_ = {first_->join(id, 0, addresses), second_->join(id, 1, addresses)};
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
    sent.push_back(pattern(i * 5000, static_cast<uint8_t>(i)));
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
  Bytes given = pattern(64U << 20U, 1);
  Bytes place(given.size());
  const auto receiving = groups_[1]->receive(0, 1, 0, at(place));
  groups_[0]->send(1, 1, 0, all(given)).reset();
  const Bytes sent = pattern(1000, 1);
  Bytes received(sent.size());
  const auto next = groups_[1]->receive(0, 2, 0, at(received));
  const auto sending = groups_[0]->send(1, 2, 0, all(sent));
  ASSERT_TRUE(comes(*signal_, [&] { return next->state().isComplete(); }));
  EXPECT_EQ(received, sent);
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
}  // namespace bagua::wire
