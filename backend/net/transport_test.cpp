// SPDX-License-Identifier: Apache-2.0
#include "backend/net/transport.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "tests/support/made_up_peer.h"
#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

class MessageSize : public TwoTransports, public ::testing::WithParamInterface<uint64_t> {};

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

TEST_F(TwoTransports, OfALargeMessageNoMoreThanTheEagerPartLeavesBeforeThereIsAPlace) {
  const Bytes sent = pattern(kEagerBytes + (8U << 20U), 0);
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  std::this_thread::sleep_for(200ms);
  EXPECT_FALSE(sending->state().isComplete);
  Bytes received(sent.size());
  const auto receiving = groups_[1]->receive(0, 1, 0, at(received));
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
  EXPECT_EQ(received, sent);
}

TEST_F(TwoTransports, WhatIsMadeReadyInPiecesArrivesInPieces) {
  const Bytes sent = pattern(1U << 20U, 9);
  Bytes received(sent.size());
  auto place = at(received);
  place.tellsProgress = true;
  const auto receiving = groups_[1]->receive(0, 1, 0, std::move(place));
  const auto sending =
      groups_[0]->send(1, 1, 0, {.data = sent.data(), .size = sent.size(), .ready = 1000, .signal = signal_});
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().arrived == 1000; }));
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(receiving->state().arrived, 1000);
  sending->makeReady(sent.size());
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
  EXPECT_EQ(received, sent);
}

TEST_F(TwoTransports, ManyMessagesInBothDirectionsAreToldApart) {
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

TEST_F(TwoTransports, AMessageOfAnotherSizeIsNotWrittenToItsPlace) {
  const Bytes sent = pattern(100, 1);
  Bytes received(50);
  const auto receiving = groups_[1]->receive(0, 1, 0, at(received));
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().total.has_value(); }));
  EXPECT_EQ(receiving->state().total, 100);
  EXPECT_EQ(received, Bytes(50));
}

TEST_F(TwoTransports, AMessageThatIsGivenUpDoesNotStopTheOthers) {
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

TEST_F(TwoTransports, APlaceThatIsSmallerThanItsMessageGoesRound) {
  struct Case {
    uint64_t size;
    uint64_t room;
  };
  // The second message has a few bytes that do not leave unasked: the receiver tells of so small a place only because
  // the message ends there.
  for (const auto& [size, room] : {Case{(40U << 20U) + 5, 8U << 20U}, Case{kEagerBytes + 5, kEagerBytes}}) {
    const Bytes sent = pattern(size, 1);
    Bytes ring(room);
    Bytes received;
    const auto receiving = groups_[1]->receive(
        0, size, 0, {.data = ring.data(), .size = size, .room = room, .signal = signal_, .tellsProgress = true});
    const auto sending = groups_[0]->send(1, size, 0, all(sent));
    while (received.size() < size) {
      ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().arrived > received.size(); })) << size;
      const uint64_t end = receiving->state().arrived;
      ASSERT_LE(end - received.size(), room);
      for (uint64_t i = received.size(); i < end; ++i) received.push_back(ring[i % room]);
      receiving->use(end);
    }
    EXPECT_TRUE(received == sent) << size;
  }
}

TEST_F(TwoTransports, NothingIsWrittenWhereTheContextIsNotAccepted) {
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

TEST_F(TwoTransports, NobodyListensWhereThePeerShouldBe) {
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

// The parameter is the group that the peer has said it leaves, if any.
class EndOfTheProcess : public MadeUpPeer, public ::testing::WithParamInterface<std::optional<uint64_t>> {};

TEST_P(EndOfTheProcess, WaitsForAConnectionThatIsOpenedAgainIfThePeerMayNeedIt) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  const Bytes sent = pattern(100, 1);
  const auto sending = group_->send(1, 1, 0, {.data = sent.data(), .size = sent.size(), .ready = sent.size()});
  EXPECT_EQ(hear(first).kind, Frame::Kind::kUnsolicited);
  if (GetParam()) say(first, {.kind = Frame::Kind::kLeave, .group = *GetParam(), .key = {.source = 1}});
  std::this_thread::sleep_for(50ms);
  const uint64_t number = hello_.connection;
  reset(first);
  auto end = std::async(std::launch::async, [&] { transport_->finish(); });
  const auto second = accept();
  EXPECT_EQ(end.wait_for(2s), GetParam() == 7 ? std::future_status::ready : std::future_status::timeout);
  answer(second, {.from = kPeer, .link = 5});
  say(second, {.kind = Frame::Kind::kEnded, .key = {.stream = number}});
  EXPECT_EQ(hear(second).kind, Frame::Kind::kEnded);
  EXPECT_EQ(hear(second).kind, Frame::Kind::kUnsolicited);
  say(second, {.kind = Frame::Kind::kReceived, .received = 2});
  EXPECT_EQ(end.wait_for(5s), std::future_status::ready);
}

TEST_F(MadeUpPeer, TheEndOfTheProcessWaitsForAsLongAsThePeerTellsOfMoreAndMore) {
  const auto connection = accept();
  answer(connection, {.from = kPeer, .link = 5});
  constexpr uint32_t kMessages = 400;
  const Bytes sent = pattern(1, 1);
  std::vector<std::unique_ptr<Group::Sending>> sending;
  for (uint32_t i = 0; i < kMessages; ++i) {
    sending.push_back(group_->send(1, 1, i, {.data = sent.data(), .size = sent.size(), .ready = sent.size()}));
    EXPECT_EQ(hear(connection).kind, Frame::Kind::kUnsolicited);
    EXPECT_EQ(hearBytes(connection, sent.size()), sent);
  }
  auto told = std::chrono::steady_clock::now();
  auto end = std::async(std::launch::async, [&] { transport_->finish(); });
  // It waits for a second where the peer says nothing. There are more messages than this loop tells of.
  const auto until = std::chrono::steady_clock::now() + 1500ms;
  std::chrono::steady_clock::duration longest{0};
  uint64_t received = 0;
  while (end.wait_for(5ms) == std::future_status::timeout && std::chrono::steady_clock::now() < until) {
    say(connection, {.kind = Frame::Kind::kReceived, .received = ++received});
    const auto now = std::chrono::steady_clock::now();
    longest = std::max(longest, now - std::exchange(told, now));
  }
  const bool isWaiting = end.wait_for(0s) == std::future_status::timeout;
  longest = std::max(longest, std::chrono::steady_clock::now() - told);
  // The peer has said nothing for that second itself where the machine has been so busy meanwhile.
  EXPECT_TRUE(isWaiting || longest > 900ms) << "though the peer has told of " << received;
  say(connection, {.kind = Frame::Kind::kReceived, .received = kMessages});
  EXPECT_EQ(end.wait_for(5s), std::future_status::ready);
}

// Threads see that a link is lost before the transport hears of it, and may have begun another one by then.
TEST_F(MadeUpPeer, TheLossOfAFormerLinkLeavesTheOneThatIsThere) {
  const auto connection = accept();
  answer(connection, {.from = kPeer, .link = 5});
  const auto former = std::make_shared<Link>(std::make_shared<EventLoop>(), transport_->address().process,
                                             Link::Peer{kPeer, addressOf(listening_)}, 3, Link::Opening{}, transport_);
  const auto asked = group_->receive(1, 1, 0, {});
  former->close("lost");
  EXPECT_FALSE(group_->findLost());
  const auto came = come("127.0.0.1", hello_.connection + 1);
  EXPECT_EQ(hearWelcome(came).link, hello_.link) << "the transport has made a third one";
}

TEST_F(MadeUpPeer, ThatSendsWithoutAPlaceAndWithoutAChargeIsNotListenedTo) {
  const auto connection = accept();
  answer(connection, {.from = kPeer, .link = 5});
  const MessageKey key{.stream = 9, .source = 1};
  say(connection, {.kind = Frame::Kind::kData, .group = 7, .key = key, .total = 100, .payloadBytes = 100});
  sayBytes(connection, pattern(100, 1));
  EXPECT_NE(lost().find("contradicts"), std::string::npos) << lost();
}

TEST_F(MadeUpPeer, ThatHasLostItsLinkAndBeginsAnewIsSpokenWithOverAnother) {
  const auto connection = accept();
  const uint64_t theirs = hello_.connection + 1;
  const auto before = come("127.0.0.1", theirs, 5);
  EXPECT_EQ(hearWelcome(before).link, hello_.link);
  const auto after = come("127.0.0.1", theirs + 2, 6);
  EXPECT_NE(hearWelcome(after).link, hello_.link);
  EXPECT_NE(lost().find("Connection closed by peer"), std::string::npos) << lost();
}

INSTANTIATE_TEST_SUITE_P(HasLeft, EndOfTheProcess, ::testing::Values(std::nullopt, 7, 8));

}  // namespace
}  // namespace bagua::net
