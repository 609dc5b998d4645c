// SPDX-License-Identifier: Apache-2.0
// Firewalls on the way to a peer: they drop connections or refuse them, all or some, and the peer may live all the
// same.
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "backend/net/probe.h"
#include "tests/support/held_streams.h"
#include "tests/support/made_up_peer.h"
#include "tests/support/open_sockets.h"
#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kPatience{2400};
// A probe is over by then, where it is answered, or refused.
constexpr std::chrono::milliseconds kUntilProbed = kPatience / 2;

class Firewall : public MadeUpPeer {
 protected:
  explicit Firewall(std::chrono::milliseconds patience = kPatience) : MadeUpPeer(2, patience) {}
  void SetUp() override {}
  void join() { group_ = transport_->join(7, 0, {transport_->address(), {kPeer, address_}}); }
  // From here on, connections to the peer are reset.
  void refuse() const { shutdown(listening_.number(), SHUT_RDWR); }
  UnsharedFile comeFrom(const std::string& address) {
    const uint64_t parity = parityOf(kPeer, transport_->address().process);
    auto came = come(address, 2 * ++came_ + parity);
    EXPECT_EQ(hear(came).kind, Frame::Kind::kWelcome);
    group_->watch(1);
    return came;
  }
  // Only this process hears that the connection is gone.
  void expectThatItMayComeAgain(const UnsharedFile& connection) {
    reset(connection);
    std::this_thread::sleep_for(1s);
    EXPECT_FALSE(group_->findLost()) << *group_->findLost();
    comeFrom("127.0.0.1");
  }

  const SocketAddress address_ = addressOf(listening_);
  uint64_t came_ = 0;
};

TEST_F(Firewall, ThatRefusesAllDoesNotMeanThatThePeerHasEnded) {
  refuse();
  join();
  const auto came = comeFrom("127.0.0.1");
  std::this_thread::sleep_for(kUntilProbed);
  expectThatItMayComeAgain(came);
}

TEST_F(Firewall, ThatRefusesAllButTheFirstConnectionDoesNotMeanThatThePeerHasEnded) {
  join();
  group_->watch(1);
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  std::this_thread::sleep_for(50ms);
  refuse();
  // It asks for a second connection.
  const Bytes large = pattern(kEagerBytes, 1);
  const auto sending = group_->send(1, 1, 0, {.data = large.data(), .size = large.size(), .ready = large.size()});
  std::this_thread::sleep_for(kUntilProbed);
  expectThatItMayComeAgain(first);
}

// A peer with several interfaces, that has never been spoken to.
TEST_F(Firewall, ThatIsNotThereMeansThatADeathIsNoticedSoon) {
  join();
  const auto came = comeFrom("127.0.0.2");
  const auto probe = accept();
  EXPECT_EQ(hello_.peerLink, Hello::kNoLink);
  answer(probe, {.from = kPeer, .link = 0});
  uint8_t byte = 0;
  EXPECT_EQ(recv(probe.number(), &byte, 1, 0), 0) << "it does not stay";
  EXPECT_FALSE(group_->findLost());
  refuse();
  reset(came);
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_NE(lost().find("its process has ended, nobody listens"), std::string::npos) << lost();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 1s);
}

TEST_F(Firewall, ThatIsNotThereMeansThatAPeerIsProbedOnce) {
  join();
  const auto came = comeFrom("127.0.0.1");
  const auto probe = accept();
  answer(probe, {.from = kPeer, .link = 0});
  std::this_thread::sleep_for(2 * kPatience);
  EXPECT_FALSE(UnsharedFile(accept4(listening_.number(), nullptr, nullptr, SOCK_CLOEXEC)).isOpen());
  EXPECT_FALSE(group_->findLost());
}

// Nobody hears of the connections that are lost with the line; new ones are refused once it is back.
TEST_F(Firewall, ThatIsNotThereMeansThatADeathWhileTheLineIsAwayIsNoticedSoonAfter) {
  join();
  group_->watch(1);
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  std::this_thread::sleep_for(50ms);
  deafen(first.number());
  refuse();
  const Bytes sent = pattern(10, 1);
  const auto sending = group_->send(1, 1, 0, {.data = sent.data(), .size = sent.size(), .ready = sent.size()});
  EXPECT_NE(lost().find("its process has ended, nobody listens"), std::string::npos) << lost();
}

TEST_F(Firewall, ThatEndsConnectionsIsNotForEver) {
  join();
  group_->watch(1);
  const auto begun = std::chrono::steady_clock::now();
  const auto waited = [&] { return std::chrono::steady_clock::now() - begun; };
  while (!group_->findLost() && waited() < 2 * kPatience) {
    UnsharedFile(accept4(listening_.number(), nullptr, nullptr, SOCK_CLOEXEC));
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_NE(lost().find("cannot connect to 127.0.0.1"), std::string::npos) << lost();
  EXPECT_GE(waited(), kPatience * 9 / 10) << "others that are reset may be followed by one that is not";
}

class PatientFirewall : public Firewall {
 protected:
  PatientFirewall() : Firewall(8s) {}
};

TEST_F(PatientFirewall, ThatHasEndedOneConnectionDoesNotShortenTheWaitForALineThatIsAway) {
  join();
  group_->watch(1);
  reset(accept());
  deafen(listening_.number());
  // The second try that nobody answers is over after 6.15 s.
  std::this_thread::sleep_for(6500ms);
  EXPECT_FALSE(group_->findLost()) << *group_->findLost();
  const int none = 0;
  EXPECT_EQ(setsockopt(listening_.number(), SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none)), 0);
  EXPECT_TRUE(accept().isOpen());
}

// Encrypts nothing. Makes the next of the calls that a test has planned whenever a connection begins: the kernel has
// let that one through by then, or has refused it.
class PlannedCalls final : public Encryption {
 public:
  void plan(std::vector<std::function<void()>> calls) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_ = std::move(calls);
    next_ = 0;
  }
  [[nodiscard]] std::unique_ptr<EncryptedStream> accept(int socket) const override { return streams_.accept(socket); }
  [[nodiscard]] std::unique_ptr<EncryptedStream> connect(int socket) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (next_ < calls_.size()) calls_[next_++]();
    return streams_.connect(socket);
  }

 private:
  const HeldStreams streams_{std::make_shared<Gate>()};
  mutable std::mutex mutex_;
  std::vector<std::function<void()>> calls_;
  mutable size_t next_ = 0;
};

class FirewallThatIsLoadedAnew : public MadeUpPeer {
 protected:
  FirewallThatIsLoadedAnew() : FirewallThatIsLoadedAnew(std::make_shared<PlannedCalls>()) {}
  explicit FirewallThatIsLoadedAnew(const std::shared_ptr<PlannedCalls>& planned)
      : MadeUpPeer(1, kPatienceWithSilence, planned, portToKeep()), planned_(planned) {}
  // Who asks for a port by its number has the same one when it listens again.
  static config::PortRange portToKeep() {
    const uint16_t free = freePorts().first;
    return {.first = free, .last = free};
  }

  const std::shared_ptr<PlannedCalls> planned_;
};

// One refusal follows another in a quarter of a second only where nobody listens any more.
TEST_F(FirewallThatIsLoadedAnew, MayRefuseAgainAfterAConnectionThatItHasReset) {
  const auto first = accept();
  answer(first, {.from = kPeer, .link = 5});
  // The transport has heard the answer when it tells that something after it has come.
  say(first, {.kind = Frame::Kind::kPlace, .group = 7, .total = 1});
  say(first, {.kind = Frame::Kind::kReceived, .total = 1});
  EXPECT_EQ(hear(first).kind, Frame::Kind::kReceived);
  const auto close = [this] { shutdown(listening_.number(), SHUT_RDWR); };
  const auto open = [this] { EXPECT_EQ(listen(listening_.number(), SOMAXCONN), 0); };
  // It refuses the first connection, resets the second one, and refuses the third.
  planned_->plan({open, close, open});
  close();
  reset(first);
  const auto next = accept();
  EXPECT_EQ(hello_.peerLink, 5) << "another connection of the same link";
  answer(next, {.from = kPeer, .link = 5});
  EXPECT_EQ(hear(next).kind, Frame::Kind::kEnded) << "of the first connection";
  EXPECT_FALSE(group_->findLost()) << *group_->findLost();
}

// A firewall on the way to the second process, which drops connections after the first.
class SilentFirewall : public TwoTransports {
 protected:
  static uint16_t portOf(const std::shared_ptr<Transport>& transport) { return transport->address().address.port(); }
};

TEST_F(SilentFirewall, LeavesTheConnectionsThatThereAre) {
  ASSERT_TRUE(arrives(1, pattern(10, 1)));
  deafen(listenerAt(portOf(second_)));
  // It asks for more connections.
  EXPECT_TRUE(arrives(2, pattern(40U << 20U, 2)));
  // Only the second process can open one again.
  ASSERT_GT(
      resetConnections([&](uint16_t own, uint16_t peer) { return own == portOf(second_) || peer == portOf(second_); }),
      0);
  EXPECT_TRUE(arrives(3, pattern(1U << 20U, 3)));
  EXPECT_FALSE(groups_[0]->findLost());
  EXPECT_FALSE(groups_[1]->findLost());
}

class OneProbe : public TwoTransports {
 protected:
  [[nodiscard]] Probe::Result resultAt(const SocketAddress& to, const ProcessId& process) const {
    std::promise<Probe::Result> told;
    const Hello hello{.from = {1, 2}, .to = process, .link = 1, .peerLink = Hello::kNoLink};
    const auto probe = std::make_shared<Probe>(loop_, hello, [&](Probe::Result result) { told.set_value(result); });
    loop_->callLater(0ms, [&] { probe->start(to, nullptr, 300ms); });
    return told.get_future().get();
  }
  const std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>();
  const UnsharedFile listening_ = listenAt("127.0.0.1");
};

TEST_F(OneProbe, IsAnsweredByTheProcessItself) {
  const auto& [process, address] = first_->address();
  EXPECT_EQ(resultAt(address, process), Probe::Result::kAnswered);
  EXPECT_EQ(resultAt(address, second_->address().process), Probe::Result::kUnclear) << "another one";
}

TEST_F(OneProbe, TellsWhetherConnectionsGetThere) {
  const auto to = addressOf(listening_);
  EXPECT_EQ(resultAt(to, {3, 4}), Probe::Result::kUnclear) << "it is stopped";
  deafen(listening_.number());
  EXPECT_EQ(resultAt(to, {3, 4}), Probe::Result::kFiltered) << "no answer";
  shutdown(listening_.number(), SHUT_RDWR);
  EXPECT_EQ(resultAt(to, {3, 4}), Probe::Result::kFiltered) << "refused";
}

TEST_F(OneProbe, ThatIsStoppedTellsNothing) {
  bool isTold = false;
  const Hello hello{.from = {1, 2}, .to = {3, 4}, .link = 1, .peerLink = Hello::kNoLink};
  const auto probe = std::make_shared<Probe>(loop_, hello, [&](Probe::Result) { isTold = true; });
  loop_->callLater(0ms, [&] { probe->start(addressOf(listening_), nullptr, 100ms); });
  probe->stop();
  std::this_thread::sleep_for(300ms);
  loop_->stop();
  EXPECT_FALSE(isTold);
}

}  // namespace
}  // namespace bagua::net
