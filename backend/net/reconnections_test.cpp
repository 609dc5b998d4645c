// SPDX-License-Identifier: Apache-2.0
// A link outlives its connections: whatever is reset, and when, costs only time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <random>
#include <thread>

#include "tests/support/made_up_peer.h"
#include "tests/support/open_sockets.h"
#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

class Reconnections : public TwoTransports {
 protected:
  [[nodiscard]] bool isOfOurs(uint16_t own, uint16_t peer) const {
    return own == portOf(first_) || peer == portOf(first_) || own == portOf(second_) || peer == portOf(second_);
  }
  int resetAll() const {
    return resetConnections([&](uint16_t own, uint16_t peer) { return isOfOurs(own, peer); });
  }
  static uint16_t portOf(const std::shared_ptr<Transport>& transport) { return transport->address().address.port(); }
};

TEST_F(Reconnections, AnIdleConnectionThatIsResetIsOpenedAgain) {
  for (uint64_t stream = 0; stream < 3; ++stream) {
    ASSERT_TRUE(arrives(stream, pattern(1000, 3)));
    ASSERT_GT(resetAll(), 0);
    // Without anything to send: the end of the peer is to be noticed.
    const auto isOpen = [&] {
      return !connectedSockets([&](uint16_t own, uint16_t peer) { return isOfOurs(own, peer); }).empty();
    };
    for (const auto end = std::chrono::steady_clock::now() + 5s; !isOpen();) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      std::this_thread::sleep_for(1ms);
    }
  }
  EXPECT_FALSE(groups_[0]->findLost());
  EXPECT_FALSE(groups_[1]->findLost());
}

// Whether ranks share memory.
class ResetAtRandom : public Reconnections, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { joinAs(7, GetParam() ? std::vector<int>{0, 1} : std::vector<int>{}); }
};

// More than the accounts of unsolicited bytes hold, so that none of them may be charged twice.
TEST_P(ResetAtRandom, MessagesOfAllSizesArriveOnceAndWhole) {
  constexpr uint64_t kSizes[] = {0, 1, 1000, 20'000, 70'000, 300'000, 1'000'000, 5'000'000};
  std::atomic<bool> isOver = false;
  std::atomic<int> resets = 0;
  std::thread trouble([&] {
    std::minstd_rand random(1);
    while (!isOver) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
      // One of them, or all.
      const bool isAll = random() % 2 == 0;
      bool isFirst = true;
      resets += resetConnections(
          [&](uint16_t own, uint16_t peer) { return isOfOurs(own, peer) && (isAll || std::exchange(isFirst, false)); });
    }
  });
  struct Message {
    Bytes sent;
    Bytes received;
    std::unique_ptr<Group::Sending> sending;
    std::unique_ptr<Group::Receiving> receiving;
  };
  const auto begun = std::chrono::steady_clock::now();
  uint32_t index = 0;
  bool isWhole = true;
  while (isWhole && (std::chrono::steady_clock::now() - begun < 1s || resets < 30)) {
    std::deque<Message> messages;
    for (const uint64_t size : kSizes) {
      for (const int from : {0, 1}) {
        auto& message = messages.emplace_back();
        message.sent = pattern(size, static_cast<uint8_t>(index));
        message.received.resize(size);
        const bool isExpected = index % 3 == 0;
        const auto expect = [&] {
          message.receiving = groups_[1 - from]->receive(from, 1, index, at(message.received));
        };
        if (isExpected) expect();
        message.sending = groups_[from]->send(1 - from, 1, index, all(message.sent));
        if (!isExpected) expect();
        ++index;
      }
    }
    for (auto& message : messages) {
      isWhole = isWhole && comes(*signal_, [&] { return message.sending->state().isComplete; });
      EXPECT_EQ(message.sending->state().error, "");
      // Whoever has sent it uses the memory for something else.
      message.sending.reset();
      const Bytes sent = std::exchange(message.sent, Bytes(message.sent.size(), 0xEE));
      isWhole = isWhole && comes(*signal_, [&] { return message.receiving->state().isComplete(); });
      EXPECT_EQ(message.receiving->state().error, "");
      EXPECT_TRUE(message.received == sent) << sent.size() << " bytes after " << resets << " resets";
    }
    isWhole = isWhole && !HasFailure();
  }
  isOver = true;
  trouble.join();
  EXPECT_TRUE(isWhole) << "after " << resets << " resets";
}

INSTANTIATE_TEST_SUITE_P(SharedMemory, ResetAtRandom, ::testing::Values(false, true));

TEST_F(MadeUpPeer, AnotherProcessAtTheAddressOfThePeerMeansThatItHasEnded) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  std::this_thread::sleep_for(50ms);
  reset(first);
  const auto second = accept();
  EXPECT_EQ(hello_.peerLink, 5);
  answer(second, {.from = {3, 4}, .link = 6});
  EXPECT_NE(lost().find("its process has ended, another one answers"), std::string::npos) << lost();
  EXPECT_TRUE(group_->hasDied(1 - group_->rank()));
}

TEST_F(MadeUpPeer, WhereNobodyListensAnyMoreThePeerHasEnded) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  std::this_thread::sleep_for(50ms);
  shutdown(listening_.number(), SHUT_RDWR);
  reset(first);
  EXPECT_NE(lost().find("its process has ended, nobody listens"), std::string::npos) << lost();
  EXPECT_TRUE(group_->hasDied(1 - group_->rank()));
}

TEST_F(MadeUpPeer, APeerThatHasGivenUpTheLinkIsAnErrorAtOnce) {
  answer(accept(), {.from = kPeer, .link = 5});
  answer(accept(), {.from = kPeer, .link = 0});
  EXPECT_NE(lost().find("has given up what it had"), std::string::npos) << lost();
}

TEST_F(MadeUpPeer, EverySideSaysItsLastWordOfAConnection) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  const uint64_t number = hello_.connection;
  const Bytes sent = pattern(100, 1);
  const auto signal = std::make_shared<Signal>();
  const auto sending =
      group_->send(1, 1, 0, {.data = sent.data(), .size = sent.size(), .ready = sent.size(), .signal = signal});
  EXPECT_EQ(hear(first).kind, Frame::Kind::kUnsolicited);
  // Two frames that are counted, and one that is not.
  say(first, {.kind = Frame::Kind::kPlace, .total = 1});
  say(first, {.kind = Frame::Kind::kReceived});
  say(first, {.kind = Frame::Kind::kCredit, .total = 1});
  std::this_thread::sleep_for(50ms);
  reset(first);
  const auto second = accept();
  EXPECT_NE(hello_.connection, number);
  answer(second, {.from = kPeer, .link = 5});
  const Frame word = hear(second);
  EXPECT_EQ(word.kind, Frame::Kind::kEnded);
  EXPECT_EQ(word.key.stream, number);
  EXPECT_EQ(word.total, 2);
  // Nothing is sent again before it is known what has come.
  std::this_thread::sleep_for(50ms);
  Frame none;
  EXPECT_EQ(recv(second.number(), &none, sizeof(none), MSG_DONTWAIT), -1);
  say(second, {.kind = Frame::Kind::kEnded, .key = {.stream = number}, .total = 0});
  const Frame again = hear(second);
  EXPECT_EQ(again.kind, Frame::Kind::kUnsolicited);
  EXPECT_EQ(again.payloadBytes, 100);
  EXPECT_FALSE(group_->findLost());
}

// The peer does not read, so that the kernel takes a part of a frame and no more.
TEST_F(MadeUpPeer, AFrameThatWasHalfWrittenComesAgainWhole) {
  const auto first = accept();
  const int room = 64 << 10;
  ASSERT_EQ(setsockopt(first.number(), SOL_SOCKET, SO_RCVBUF, &room, sizeof(room)), 0);
  answer(first, {.from = kPeer, .link = 5});
  const Bytes sent = pattern(kEagerBytes, 1);
  const auto sending = group_->send(1, 1, 0, {.data = sent.data(), .size = sent.size(), .ready = sent.size()});
  EXPECT_EQ(hear(first).kind, Frame::Kind::kUnsolicited);
  ASSERT_FALSE(sending->state().isComplete);
  const uint64_t number = hello_.connection;
  reset(first);
  const auto second = accept();
  answer(second, {.from = kPeer, .link = 5});
  Bytes received(sent.size());
  for (uint64_t count = 0; count < sent.size();) {
    const Frame frame = hear(second);
    ASSERT_FALSE(HasFailure()) << "after " << count << " bytes";
    if (frame.kind == Frame::Kind::kEnded) say(second, {.kind = Frame::Kind::kEnded, .key = {.stream = number}});
    if (frame.payloadBytes == 0) continue;
    const Bytes part = hearBytes(second, frame.payloadBytes);
    std::copy(part.begin(), part.end(), received.begin() + static_cast<ptrdiff_t>(frame.offset));
    count += part.size();
  }
  EXPECT_TRUE(received == sent);
}

// Whether the message is given up, or only its memory.
class MemoryGivenBack : public MadeUpPeer, public ::testing::WithParamInterface<bool> {};

TEST_P(MemoryGivenBack, MayChangeThoughTheFrameHasToBeSentAgain) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  const Bytes sent = pattern(100'000, 1);
  Bytes memory = sent;
  const auto signal = std::make_shared<Signal>();
  auto sending =
      group_->send(1, 1, 0, {.data = memory.data(), .size = memory.size(), .ready = memory.size(), .signal = signal});
  ASSERT_TRUE(comes(*signal, [&] { return sending->state().isComplete; }));
  EXPECT_EQ(sending->state().released, 0);
  if (GetParam()) {
    sending.reset();
  } else {
    sending->release(memory.size());
    EXPECT_EQ(sending->state().released, memory.size());
  }
  std::fill(memory.begin(), memory.end(), 0xEE);
  const auto second = replace(first);
  const Frame again = hear(second);
  EXPECT_EQ(again.payloadBytes, sent.size());
  EXPECT_EQ(hearBytes(second, sent.size()), sent);
}

INSTANTIATE_TEST_SUITE_P(GivenUp, MemoryGivenBack, ::testing::Values(false, true));

TEST_F(MadeUpPeer, AFrameThatComesAgainBecauseItWasInterruptedIsChargedOnce) {
  auto connection = accept();
  answer(connection, {.from = kPeer, .link = 5});
  // In all as much as one credit is for.
  Bytes received(kCreditBytes);
  const auto signal = std::make_shared<Signal>();
  const auto receiving = group_->receive(1, 1, 0, {.data = received.data(), .size = received.size(), .signal = signal});
  Frame frame{.kind = Frame::Kind::kUnsolicited,
              .group = 7,
              .key = {.stream = 1, .source = 1, .index = 0},
              .total = received.size(),
              .payloadBytes = 100'000};
  say(connection, frame);
  sayBytes(connection, Bytes(frame.payloadBytes / 2));
  std::this_thread::sleep_for(50ms);
  connection = replace(connection);
  uint64_t charge = 0;
  while (frame.offset < frame.total) {
    say(connection, frame);
    sayBytes(connection, pattern(frame.payloadBytes, 1));
    charge += chargeOf(frame.payloadBytes);
    frame.offset += frame.payloadBytes;
    frame.payloadBytes = static_cast<uint32_t>(std::min<uint64_t>(kMostPayload, frame.total - frame.offset));
  }
  ASSERT_TRUE(comes(*signal, [&] { return receiving->state().isComplete(); }));
  Frame credit = hear(connection);
  while (credit.kind == Frame::Kind::kReceived) credit = hear(connection);
  EXPECT_EQ(credit.kind, Frame::Kind::kCredit);
  EXPECT_EQ(credit.total, charge);
}

TEST_F(MadeUpPeer, OfAConnectionThatNeverCameNothingHasComeAndItIsNotTakenLater) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  // The peer's have the other remainder.
  const uint64_t theirs = hello_.connection + 1;
  say(first, {.kind = Frame::Kind::kEnded, .key = {.stream = theirs}, .total = 0});
  const Frame word = hear(first);
  EXPECT_EQ(word.kind, Frame::Kind::kEnded);
  EXPECT_EQ(word.key.stream, theirs);
  EXPECT_EQ(word.total, 0);
  const auto late = come("127.0.0.1", theirs);
  uint8_t byte = 0;
  EXPECT_EQ(recv(late.number(), &byte, 1, 0), 0) << "it is answered";
  EXPECT_FALSE(group_->findLost());
}

TEST_F(MadeUpPeer, AnyNumberOfConnectionsMayNeverCome) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  const uint64_t theirs = hello_.connection + 1;
  for (uint64_t number = theirs; number < theirs + 4000; number += 2) {
    say(first, {.kind = Frame::Kind::kEnded, .key = {.stream = number}, .total = 0});
    Frame word = hear(first);
    while (word.kind == Frame::Kind::kReceived) word = hear(first);
    ASSERT_EQ(word.key.stream, number);
  }
  uint8_t byte = 0;
  EXPECT_EQ(recv(come("127.0.0.1", theirs).number(), &byte, 1, 0), 0) << "it is answered";
  EXPECT_EQ(hear(come("127.0.0.1", theirs + 4000)).kind, Frame::Kind::kWelcome);
}

// A translator of addresses has forgotten the peer, and somebody else has the peer's own address here.
TEST_F(MadeUpPeer, ThatHasComeFromElsewhereMayComeAgainWhoeverIsAtItsAddress) {
  const auto first = accept();
  const uint64_t theirs = hello_.connection + 1;
  const auto came = come("127.0.0.2", theirs);
  EXPECT_EQ(hear(came).kind, Frame::Kind::kWelcome);
  answer(first, {.from = {3, 4}, .link = 6});
  shutdown(listening_.number(), SHUT_RDWR);
  reset(came);
  // Meanwhile every connection to that address is refused.
  std::this_thread::sleep_for(3s);
  EXPECT_FALSE(group_->findLost()) << *group_->findLost();
  EXPECT_EQ(hear(come("127.0.0.2", theirs + 2)).kind, Frame::Kind::kWelcome);
}

// A Hello has not been answered for long, and has been said on a second connection.
class UnansweredHello : public MadeUpPeer {
 protected:
  UnansweredHello() : MadeUpPeer(2, kPatience) {}
  void SetUp() override {
    MadeUpPeer::SetUp();
    sending_ = group_->send(1, 1, 0, {.data = sent_.data(), .size = sent_.size(), .ready = sent_.size()});
    firstOne_ = accept();
    first_ = hello_;
    const auto begun = std::chrono::steady_clock::now();
    secondOne_ = accept();
    second_ = hello_;
    EXPECT_GT(std::chrono::steady_clock::now() - begun, kPatience / 4);
    EXPECT_NE(second_.connection, first_.connection);
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(recv(secondOne_.number(), &word_, sizeof(word_), MSG_DONTWAIT), -1) << "it may be needless";
  }
  void answerTo(const Hello& hello, const UnsharedFile& connection) {
    hello_ = hello;
    answer(connection, {.from = kPeer, .link = 5});
  }
  // Both say of `ended` that nothing has come over it.
  void expectLastWords(const Hello& ended, const UnsharedFile& connection) {
    word_ = hear(connection);
    EXPECT_EQ(word_.kind, Frame::Kind::kEnded);
    EXPECT_EQ(word_.key.stream, ended.connection);
    EXPECT_EQ(word_.total, 0);
    say(connection, {.kind = Frame::Kind::kEnded, .key = {.stream = ended.connection}, .total = 0});
  }
  void expectMessage(const UnsharedFile& connection) {
    EXPECT_EQ(hear(connection).kind, Frame::Kind::kUnsolicited);
    EXPECT_EQ(hearBytes(connection, sent_.size()), sent_);
  }

  static constexpr std::chrono::milliseconds kPatience{1600};
  const Bytes sent_ = pattern(100, 1);
  const uint64_t replaced_ = reconnections();
  std::unique_ptr<Group::Sending> sending_;
  UnsharedFile firstOne_;
  UnsharedFile secondOne_;
  Hello first_;
  Hello second_;
  Frame word_;
};

TEST_F(UnansweredHello, IsGivenUpWhereAnotherIsAnsweredAndWhatItsConnectionTookComesAgain) {
  answerTo(second_, secondOne_);
  expectLastWords(first_, secondOne_);
  expectMessage(secondOne_);
  EXPECT_EQ(reconnections(), replaced_ + 1);
  EXPECT_FALSE(group_->findLost());
}

TEST_F(UnansweredHello, GoesOnIfItIsAnsweredAfterAllAndTheOtherConnectionEnds) {
  answerTo(first_, firstOne_);
  expectMessage(firstOne_);
  std::this_thread::sleep_for(50ms);
  answerTo(second_, secondOne_);
  EXPECT_EQ(recv(secondOne_.number(), &word_, sizeof(word_), 0), 0);
  expectLastWords(second_, firstOne_);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(reconnections(), replaced_) << "nothing has been replaced";
  // Nor is it a sign that more connections than the first are not possible.
  const Bytes large = pattern(kEagerBytes, 2);
  const auto sending = group_->send(1, 1, 1, {.data = large.data(), .size = large.size(), .ready = large.size()});
  EXPECT_TRUE(accept().isOpen());
  EXPECT_FALSE(group_->findLost());
}

TEST_F(MadeUpPeer, WordsThatContradictEachOtherEndTheLink) {
  const auto says = [&](const Frame& frame) {
    const auto transport = Transport::listenAt("127.0.0.1", 1);
    group_ = transport->join(7, 0, {transport->address(), {kPeer, addressOf(listening_)}});
    group_->watch(1);
    const auto connection = accept();
    answer(connection, {.from = kPeer, .link = 5});
    auto said = frame;
    if (said.key.stream == 0) said.key.stream = hello_.connection;
    say(connection, said);
    return lost();
  };
  // The other transport does not try again meanwhile.
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  EXPECT_NE(says({.kind = Frame::Kind::kEnded}).find("contradicts"), std::string::npos) << "of itself";
  EXPECT_NE(says({.kind = Frame::Kind::kEnded, .key = {.stream = 1000}, .total = 7}).find("contradicts"),
            std::string::npos)
      << "frames of a connection that never was";
  EXPECT_NE(says({.kind = Frame::Kind::kReceived, .received = 3}).find("were not sent"), std::string::npos);
}

}  // namespace
}  // namespace bagua::net
