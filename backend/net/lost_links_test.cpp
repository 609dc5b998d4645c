// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "backend/net/transport.h"
#include "tests/support/held_streams.h"
#include "tests/support/open_sockets.h"
#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

TEST_F(TwoTransports, WhoeverLeavesIsWaitedForNoLongerAndItsLastMessagesArrive) {
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
  // Nothing is lost with the link, which this rank uses too.
  groups_[1]->watch(0);
  second_->loseLinksForTest();
  EXPECT_FALSE(groups_[1]->findLost());
}

TEST_F(TwoTransports, ALossIsFoundThoughNobodyWaits) {
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

TEST_F(TwoTransports, APeerThatGoesIsNoticedByWhoWaitsForIt) {
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

TEST_F(TwoTransports, AnotherGroupWorksAfterALoss) {
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

TEST_F(TwoTransports, AGroupThatHasNotUsedALinkOutlivesIt) {
  const Bytes sent = pattern(1000, 1);
  ASSERT_TRUE(arrives(1, sent));
  const auto used = groups_;
  joinAs(8);
  first_->loseLinksForTest();
  const auto isLost = [&] { return !used[1]->errorOf(0).empty(); };
  for (const auto end = std::chrono::steady_clock::now() + 10s; !isLost() && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(1ms);
  }
  ASSERT_TRUE(isLost());
  EXPECT_EQ(groups_[0]->errorOf(1), "");
  EXPECT_EQ(groups_[1]->errorOf(0), "");
  EXPECT_TRUE(arrives(1, sent));
}

TEST_F(TwoTransports, WhatCameForAGroupThatIsNeverJoinedIsThrownAway) {
  const std::vector<ProcessAddress> addresses{first_->address(), second_->address()};
  const auto group = first_->join(8, 0, addresses);
  const Bytes sent = pattern(kEagerBytes, 5);
  std::vector<std::unique_ptr<Group::Sending>> sending;
  const auto allLeave = [&] {
    return std::all_of(sending.begin(), sending.end(), [](const auto& one) { return one->state().isComplete; });
  };
  {
    const Membership membership(second_, 8);
    for (uint32_t i = 0; i < 12; ++i) sending.push_back(group->send(1, 1, i, all(sent)));
    std::this_thread::sleep_for(300ms);
    EXPECT_FALSE(allLeave());
  }
  EXPECT_TRUE(comes(*signal_, allLeave));
  // What comes later is, too.
  for (uint32_t i = 12; i < 24; ++i) sending.push_back(group->send(1, 1, i, all(sent)));
  EXPECT_TRUE(comes(*signal_, allLeave));
}

// What has come before the end of a membership is told of, and what comes after it.
TEST_F(TwoTransports, WhoeverSendsForAGroupThatThePeerHasLeftHearsOfIt) {
  const std::vector<ProcessAddress> addresses{first_->address(), second_->address()};
  const Bytes sent = pattern(10, 1);
  for (const bool isJoined : {true, false}) {
    for (const bool isEarly : {true, false}) {
      const uint64_t id = 8 + (isJoined ? 2 : 0) + (isEarly ? 1 : 0);
      const auto group = first_->join(id, 0, addresses);
      const auto receiving = group->receive(1, 1, 0, {.signal = signal_});
      std::optional<Membership> membership(std::in_place, second_, id);
      auto joined = isJoined ? second_->join(id, 1, addresses) : nullptr;
      std::unique_ptr<Group::Sending> sending;
      if (isEarly) {
        sending = group->send(1, 1, 0, all(sent));
        std::this_thread::sleep_for(100ms);
        EXPECT_EQ(receiving->state().error, "");
      }
      joined.reset();
      membership.reset();
      if (!isEarly) sending = group->send(1, 1, 0, all(sent));
      ASSERT_TRUE(comes(*signal_, [&] { return !receiving->state().error.empty(); })) << isJoined << isEarly;
      EXPECT_NE(receiving->state().error.find("rank 1 has left the group"), std::string::npos);
      EXPECT_NE(group->errorOf(1), "");
    }
  }
  EXPECT_TRUE(arrives(1, sent)) << "another group";
}

// Both processes open connections whose other ends this test can stop.
class HeldTransports : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::vector<ProcessAddress> addresses{first_->address(), second_->address()};
    groups_ = {first_->join(7, 0, addresses), second_->join(7, 1, addresses)};
    const Bytes sent = pattern(10, 1);
    const auto connecting = send(0, sent);
    ASSERT_TRUE(comes(*signal_, [&] { return connecting->state().isComplete; }));
  }
  void TearDown() override { gate_->open(); }
  std::unique_ptr<Group::Sending> send(uint32_t index, const Bytes& sent) {
    return groups_[0]->send(1, 1, index,
                            {.data = sent.data(), .size = sent.size(), .ready = sent.size(), .signal = signal_});
  }

  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::shared_ptr<Transport> first_ = Transport::listenAt("127.0.0.1", 1, std::make_shared<HeldStreams>(gate_));
  std::shared_ptr<Transport> second_ =
      Transport::listenAt("127.0.0.1", 1, std::make_shared<HeldStreams>(std::make_shared<Gate>()));
  std::vector<std::shared_ptr<Group>> groups_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
};

TEST_F(HeldTransports, AMessageThatIsGivenUpHalfwayEndsWithWhatWasInIt) {
  const Bytes sent = pattern(200'000, 3);
  Bytes memory = sent;
  Bytes received(sent.size());
  const auto receiving = groups_[1]->receive(
      0, 1, 1, {.data = received.data(), .size = received.size(), .signal = signal_, .tellsProgress = true});
  gate_->limit(50'000);
  auto sending = send(1, memory);
  std::this_thread::sleep_for(50ms);
  ASSERT_FALSE(sending->state().isComplete);
  sending.reset();
  memory.assign(memory.size(), 0xFF);
  gate_->open();
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
  EXPECT_EQ(received, sent);
}

TEST_F(HeldTransports, GivingUpAMessageWaitsForNoOther) {
  const Bytes sent = pattern(100'000, 3);
  gate_->limit(50'000);
  auto givenUp = send(1, sent);
  // The loop's thread is kept in the middle of the frame.
  gate_->hold(0);
  gate_->waitForKept(1);
  gate_->limit(sent.size() * 4);
  const auto other = send(2, sent);
  auto hasGivenUp = std::async(std::launch::async, [&] { givenUp.reset(); });
  EXPECT_EQ(hasGivenUp.wait_for(100ms), std::future_status::timeout) << "its frame is still being written";
  // The thread ends the frame, and goes on with the next message.
  gate_->hold(1);
  gate_->waitForKept(2);
  EXPECT_EQ(hasGivenUp.wait_for(5s), std::future_status::ready);
  gate_->open();
}

class OutOfFiles : public TwoTransports {
 protected:
  void SetUp() override {
    TwoTransports::SetUp();
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
  }
  void TearDown() override { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }
  // The first process connects to the second, which has no file for it.
  void beginToConnect() {
    rlimit few = before_;
    few.rlim_cur = 256;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    const auto another = [] { return open("/dev/null", O_RDONLY | O_CLOEXEC); };
    for (int file = another(); file >= 0; file = another()) files_.emplace_back(file);
    // One is left for whoever connects, none for whoever accepts.
    files_.pop_back();
    receiving_ = groups_[1]->receive(0, 1, 0, at(received_));
    sending_ = groups_[0]->send(1, 1, 0, all(sent_));
  }
  void expectThatItConnects() {
    EXPECT_FALSE(receiving_->state().isComplete());
    files_.clear();
    EXPECT_TRUE(comes(*signal_, [&] { return receiving_->state().isComplete(); }));
    EXPECT_EQ(received_, sent_);
  }

 private:
  rlimit before_{};
  std::vector<UnsharedFile> files_;
  const Bytes sent_ = pattern(100, 1);
  Bytes received_ = Bytes(sent_.size());
  std::unique_ptr<Group::Receiving> receiving_;
  std::unique_ptr<Group::Sending> sending_;
};

TEST_F(OutOfFiles, AConnectionWaitsAndTheLoopSleeps) {
  beginToConnect();
  const auto processorTime = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  std::this_thread::sleep_for(100ms);
  const auto timeBefore = processorTime();
  std::this_thread::sleep_for(1s);
  EXPECT_LT(processorTime() - timeBefore, 100ms);
  expectThatItConnects();
}

TEST_F(OutOfFiles, WhoeverListensDoesSoAgainThoughThatFailsAtFirst) {
  std::vector<int> loops;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(file.path(), error);
    if (target == "anon_inode:[eventpoll]") loops.push_back(std::stoi(file.path().filename()));
  }
  const int listening = listenerAt(second_->address().address.port());
  beginToConnect();
  // Nothing is added twice to the same epoll.
  epoll_event none{};
  for (const int loop : loops) {
    while (epoll_ctl(loop, EPOLL_CTL_ADD, listening, &none) != 0) std::this_thread::sleep_for(1ms);
  }
  std::this_thread::sleep_for(700ms);
  for (const int loop : loops) epoll_ctl(loop, EPOLL_CTL_DEL, listening, nullptr);
  expectThatItConnects();
}

// The sockets of this process that have come in at `port`.
std::vector<int> socketsAt(uint16_t port) {
  return connectedSockets([&](uint16_t own, uint16_t /*peer*/) { return own == port; });
}

TEST_F(TwoTransports, AnIdleConnectionIsProbed) {
  ASSERT_TRUE(arrives(1, pattern(10, 1)));
  const auto sockets = socketsAt(second_->address().address.port());
  ASSERT_FALSE(sockets.empty());
  for (const int socket : sockets) {
    const auto valueOf = [&](int level, int option) {
      int value = 0;
      socklen_t size = sizeof(value);
      EXPECT_EQ(getsockopt(socket, level, option, &value, &size), 0);
      return value;
    };
    EXPECT_EQ(valueOf(SOL_SOCKET, SO_KEEPALIVE), 1);
    const int idle = valueOf(IPPROTO_TCP, TCP_KEEPIDLE);
    EXPECT_LE(idle, 60) << "address translators forget a connection after a minute or more";
    const int probing = valueOf(IPPROTO_TCP, TCP_KEEPINTVL) * valueOf(IPPROTO_TCP, TCP_KEEPCNT);
    EXPECT_EQ(std::chrono::seconds(idle + probing), kPatienceWithSilence);
    // A line may be cut just before a probe: two more looks, with up to one before the first of them, follow its error.
    EXPECT_GE(std::chrono::seconds(probing) + kPatienceWithSilence / 8, kPatienceWithSilence);
    // It would end the connection to a process that is stopped.
    EXPECT_EQ(valueOf(IPPROTO_TCP, TCP_USER_TIMEOUT), 0);
  }
}

// A peer whose kernel drops all that arrives is like a host that has lost its power.
class SilentPeer : public TwoTransports {
 protected:
  static constexpr std::chrono::milliseconds kPatience{1600};
  void SetUp() override {
    first_ = Transport::listenAt("127.0.0.1", 1, nullptr, kPatience);
    joinAs(7);
    ASSERT_TRUE(arrives(1, pattern(10, 1)));
  }
  // Neither connections nor new ones get through.
  void silence() {
    auto sockets = socketsAt(second_->address().address.port());
    sockets.push_back(listenerAt(second_->address().address.port()));
    for (const int socket : sockets) deafen(socket);
  }
  // Returns whether the link is lost within a time that is long beside its patience.
  [[nodiscard]] bool isLostSoon() {
    const auto end = std::chrono::steady_clock::now() + 3 * kPatience;
    while (std::chrono::steady_clock::now() < end) {
      if (groups_[0]->findLost()) return true;
      std::this_thread::sleep_for(10ms);
    }
    return false;
  }
  // Returns how many connections wait there.
  [[nodiscard]] static int triesAt(const UnsharedFile& listening) {
    int tries = 0;
    while (UnsharedFile(accept(listening.number(), nullptr, nullptr)).isOpen()) ++tries;
    return tries;
  }
};

TEST_F(SilentPeer, IsLostOnceItHasAcknowledgedNothingForLong) {
  silence();
  std::this_thread::sleep_for(2 * kPatience);
  EXPECT_FALSE(groups_[0]->findLost()) << "there was nothing to acknowledge";
  const Bytes sent = pattern(10, 1);
  const auto sending = groups_[0]->send(1, 2, 0, all(sent));
  ASSERT_TRUE(isLostSoon());
  EXPECT_NE(groups_[0]->findLost()->find("has acknowledged nothing"), std::string::npos) << *groups_[0]->findLost();
}

// A stopped process reads nothing, and its kernel says so.
TEST_F(SilentPeer, IsNotLostWhereItsKernelStillAnswers) {
  first_ = Transport::listenAt("127.0.0.1", 2, nullptr, kPatience);
  UnsharedFile listening = listenAt("127.0.0.1");
  const ProcessAddress stopped{{1, 2}, addressOf(listening)};
  groups_[0] = first_->join(8, 0, {first_->address(), stopped});
  const Bytes sent = pattern(kEagerBytes, 3);
  std::vector<std::unique_ptr<Group::Sending>> sending;
  for (uint32_t i = 0; i < 4; ++i) sending.push_back(groups_[0]->send(1, 1, i, all(sent)));
  EXPECT_FALSE(isLostSoon()) << *groups_[0]->findLost();
  EXPECT_FALSE(sending.back()->state().isComplete);
  // Two at once, one more after half of the patience, and one after twice that time again.
  EXPECT_EQ(triesAt(listening), 4);
}

// A proxy takes connections for a host that is dead.
TEST_F(SilentPeer, IsLostWhereConnectionsAreTakenAndNothingElseIs) {
  UnsharedFile listening = listenAt("127.0.0.1");
  // Drops what is longer than the longest header of TCP.
  constexpr uint32_t kLongestHeader = 60;
  std::array<sock_filter, 4> longer{{{BPF_LD | BPF_W | BPF_LEN, 0, 0, 0},
                                     {BPF_JMP | BPF_JGT | BPF_K, 0, 1, kLongestHeader},
                                     {BPF_RET | BPF_K, 0, 0, 0},
                                     {BPF_RET | BPF_K, 0, 0, 0xFFFFFFFF}}};
  const sock_fprog drop{longer.size(), longer.data()};
  ASSERT_EQ(setsockopt(listening.number(), SOL_SOCKET, SO_ATTACH_FILTER, &drop, sizeof(drop)), 0);
  groups_[0] = first_->join(8, 0, {first_->address(), {{1, 2}, addressOf(listening)}});
  const Bytes sent = pattern(10, 1);
  const auto sending = groups_[0]->send(1, 1, 0, all(sent));
  ASSERT_TRUE(isLostSoon());
  EXPECT_NE(groups_[0]->findLost()->find("its process does not answer. Nor has it come"), std::string::npos)
      << *groups_[0]->findLost();
  // What takes nothing is tried again sooner than what takes bytes.
  EXPECT_GE(triesAt(listening), 3);
}

}  // namespace
}  // namespace bagua::net
