// SPDX-License-Identifier: Apache-2.0
// What a job secret promises of connections between processes: who has it is spoken with, and nobody else reads,
// changes or disturbs what is said.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <filesystem>
#include <mutex>
#include <random>
#include <thread>

#include "backend/net/transport.h"
#include "backend/security/job_security.h"
#include "tests/support/open_sockets.h"
#include "tests/support/wire_tests.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

const std::string kSecret = "the secret of this job";
const std::filesystem::path kCertificates = BAGUA_TEST_CERTIFICATES;

std::shared_ptr<const Encryption> bySecret(const std::string& secret = kSecret) {
  return makeJobSecurity({.secret = secret})->encryption();
}

std::shared_ptr<const Encryption> byCertificate(const std::string& name = "rank", const std::string& secret = kSecret) {
  const config::TlsFiles files{.certificate = kCertificates / (name + ".pem"),
                               .key = kCertificates / (name + "_key.pem"),
                               .authority = kCertificates / "authority.pem"};
  return makeJobSecurity({.secret = secret, .certificates = files})->encryption();
}

int connectTo(const SocketAddress& address) {
  const int socket = ::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(socket, address.get(), address.size()), 0) << std::strerror(errno);
  return socket;
}

size_t openFiles() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

// Lies on the way to a process, and sees and may change what passes.
class Proxy {
 public:
  explicit Proxy(const SocketAddress& to) : to_(to), listening_(listenAt("127.0.0.1")) {
    thread_ = std::thread([this] { run(); });
  }
  ~Proxy() {
    isStopping_ = true;
    thread_.join();
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  [[nodiscard]] SocketAddress address() const { return addressOf(listening_); }
  [[nodiscard]] Bytes seen() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return seen_;
  }
  // The next byte that passes is another one.
  void changeOne() { isToChange_ = true; }
  [[nodiscard]] bool isToChange() const { return isToChange_; }

 private:
  void run() {
    std::vector<std::pair<UnsharedFile, UnsharedFile>> pairs;
    while (!isStopping_) {
      UnsharedFile accepted(accept4(listening_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (accepted.isOpen()) pairs.emplace_back(std::move(accepted), UnsharedFile(connectTo(to_)));
      bool isIdle = true;
      for (const auto& [one, other] : pairs) {
        const bool hasPassed = pass(one, other);
        if (pass(other, one) || hasPassed) isIdle = false;
      }
      if (isIdle) std::this_thread::sleep_for(200us);
    }
  }
  bool pass(const UnsharedFile& from, const UnsharedFile& to) {
    std::array<uint8_t, 65536> bytes;
    const ssize_t size = recv(from.number(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (size == 0) shutdown(to.number(), SHUT_WR);
    if (size <= 0) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seen_.insert(seen_.end(), bytes.begin(), bytes.begin() + size);
    }
    if (size > 100 && isToChange_.exchange(false)) bytes[static_cast<size_t>(size) / 2] ^= 1U;
    for (ssize_t sent = 0; sent < size;) {
      const ssize_t more = ::send(to.number(), bytes.data() + sent, static_cast<size_t>(size - sent), MSG_NOSIGNAL);
      if (more < 0 && errno != EAGAIN) return false;
      if (more > 0) sent += more;
    }
    return true;
  }

  const SocketAddress to_;
  const UnsharedFile listening_;
  std::atomic<bool> isStopping_ = false;
  std::atomic<bool> isToChange_ = false;
  std::mutex mutex_;
  Bytes seen_;
  std::thread thread_;
};

// Two processes in this one, and a group of both. Only the second opens connections, and only through `proxy_` if any.
class EncryptedTransportTest : public ::testing::Test {
 protected:
  void join(const std::shared_ptr<const Encryption>& first, const std::shared_ptr<const Encryption>& second,
            bool hasProxy = false) {
    first_ = Transport::listenAt("127.0.0.1", 4, first);
    second_ = Transport::listenAt("127.0.0.1", 4, second);
    ProcessAddress toFirst = first_->address();
    if (hasProxy) {
      proxy_ = std::make_unique<Proxy>(toFirst.address);
      toFirst.address = proxy_->address();
    }
    groups_ = {first_->join(7, 0, {first_->address(), second_->address()}),
               second_->join(7, 1, {toFirst, second_->address()})};
  }
  [[nodiscard]] std::unique_ptr<Group::Receiving> receive(int rank, uint64_t stream, Bytes& place) {
    return groups_[rank]->receive(1 - rank, stream, 0, {.data = place.data(), .size = place.size(), .signal = signal_});
  }
  [[nodiscard]] std::unique_ptr<Group::Sending> send(int rank, uint64_t stream, const Bytes& sent) {
    return groups_[rank]->send(1 - rank, stream, 0,
                               {.data = sent.data(), .size = sent.size(), .ready = sent.size(), .signal = signal_});
  }
  // Whether a message of `size` bytes arrives each way.
  bool speaks(uint64_t stream, uint64_t size) {
    const Bytes sent = pattern(size, 3);
    std::array<Bytes, 2> received{Bytes(size), Bytes(size)};
    const auto first = receive(0, stream, received[0]);
    const auto second = receive(1, stream, received[1]);
    // The second first: it opens the connections.
    const auto fromSecond = send(1, stream, sent);
    if (!comes(*signal_, [&] { return first->state().isComplete() || !first->state().error.empty(); })) return false;
    const auto fromFirst = send(0, stream, sent);
    const bool isThere = comes(*signal_, [&] {
      return (second->state().isComplete() && fromSecond->state().isComplete && fromFirst->state().isComplete) ||
             !second->state().error.empty();
    });
    return isThere && received[0] == sent && received[1] == sent;
  }
  // What whoever opens the connection gets to hear.
  std::string errorOfOpening() {
    const Bytes sent = pattern(100, 3);
    const auto sending = send(1, 1, sent);
    if (!comes(*signal_, [&] { return !sending->state().error.empty(); })) return "none in time";
    return sending->state().error;
  }
  // Nothing has come in.
  void expectNothingHeard() {
    Bytes place(100);
    const auto receiving = receive(0, 1, place);
    std::this_thread::sleep_for(100ms);
    EXPECT_FALSE(receiving->state().total.has_value());
    EXPECT_EQ(place, Bytes(100));
  }

  std::unique_ptr<Proxy> proxy_;
  std::shared_ptr<Transport> first_;
  std::shared_ptr<Transport> second_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
};

class EncryptedMessages : public EncryptedTransportTest, public ::testing::WithParamInterface<bool> {};

TEST_P(EncryptedMessages, OfAnySizeArriveWholeBothWays) {
  const auto encryption = GetParam() ? byCertificate() : bySecret();
  join(encryption, encryption);
  uint64_t stream = 0;
  for (const uint64_t size : {0, 1, 55, 16384, 65536, 1 << 20, (40 << 20) + 3}) {
    EXPECT_TRUE(speaks(++stream, size)) << size << " bytes";
  }
}

INSTANTIATE_TEST_SUITE_P(SecretOrCertificates, EncryptedMessages, ::testing::Values(false, true));

TEST_F(EncryptedTransportTest, ManySmallMessagesAtOnceAreToldApart) {
  join(bySecret(), bySecret());
  constexpr uint64_t kMessages = 500;
  std::vector<Bytes> sent;
  std::vector<Bytes> received;
  for (uint64_t i = 0; i < 2 * kMessages; ++i) {
    sent.push_back(pattern(i * 13, 3));
    received.emplace_back(sent.back().size());
  }
  std::vector<std::unique_ptr<Group::Receiving>> receiving;
  for (uint64_t i = 0; i < 2 * kMessages; ++i) receiving.push_back(receive(static_cast<int>(i % 2), i, received[i]));
  std::vector<std::thread> senders;
  for (uint64_t first = 0; first < 4; ++first) {
    senders.emplace_back([&, first] {
      std::vector<std::unique_ptr<Group::Sending>> sending;
      for (uint64_t i = first; i < 2 * kMessages; i += 4)
        sending.push_back(send(1 - static_cast<int>(i % 2), i, sent[i]));
      for (const auto& message : sending) {
        ASSERT_TRUE(comes(*signal_, [&] { return message->state().isComplete; })) << message->state().error;
      }
    });
  }
  for (auto& sender : senders) sender.join();
  for (const auto& message : receiving) ASSERT_TRUE(comes(*signal_, [&] { return message->state().isComplete(); }));
  EXPECT_EQ(received, sent);
}

TEST_F(EncryptedTransportTest, AKeyIsChangedBeforeItHasEncryptedTooMuch) {
  const auto encryption = makeJobSecurity({.secret = kSecret, .bytesPerKey = 100'000})->encryption();
  join(encryption, bySecret());
  EXPECT_TRUE(speaks(1, 20U << 20U));
  EXPECT_TRUE(speaks(2, 10));
}

TEST_F(EncryptedTransportTest, WhoListensOnTheWaySeesNothingOfAMessage) {
  const Bytes text = pattern(64, 3);
  const auto isSeen = [&] {
    const Bytes seen = proxy_->seen();
    EXPECT_GT(seen.size(), 1000);
    return std::search(seen.begin(), seen.end(), text.begin(), text.end()) != seen.end();
  };
  join(nullptr, nullptr, true);
  ASSERT_TRUE(speaks(1, 1000));
  ASSERT_TRUE(isSeen()) << "this proxy sees nothing at all";
  for (const auto& encryption : {bySecret(), byCertificate()}) {
    join(encryption, encryption, true);
    ASSERT_TRUE(speaks(1, 1000));
    EXPECT_FALSE(isSeen());
  }
}

TEST_F(EncryptedTransportTest, WhatIsChangedOnTheWayIsNotTakenForAMessage) {
  join(bySecret(), bySecret(), true);
  ASSERT_TRUE(speaks(1, 1000));
  Bytes received(100'000);
  const auto receiving = receive(0, 2, received);
  proxy_->changeOne();
  const Bytes sent = pattern(received.size(), 3);
  const auto sending = send(1, 2, sent);
  // It comes again, over another connection.
  ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); })) << receiving->state().error;
  EXPECT_TRUE(received == sent);
  EXPECT_FALSE(proxy_->isToChange());
}

TEST_P(EncryptedMessages, ArriveWholeWhateverConnectionsAreReset) {
  const auto encryption = GetParam() ? byCertificate() : bySecret();
  join(encryption, encryption);
  std::atomic<bool> isOver = false;
  std::atomic<int> resets = 0;
  const auto isOfOurs = [&](uint16_t own, uint16_t peer) {
    const uint16_t first = first_->address().address.port();
    const uint16_t second = second_->address().address.port();
    return own == first || own == second || peer == first || peer == second;
  };
  std::thread trouble([&] {
    std::minstd_rand random(1);
    while (!isOver) {
      // A handshake has to come to its end now and then, also on a busy machine.
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 300));
      resets += resetConnections(isOfOurs);
    }
  });
  bool speaksOn = true;
  for (uint64_t stream = 0; speaksOn && (stream < 12 || resets < 15); ++stream) {
    constexpr std::array<uint64_t, 4> kSizes{0, 1000, 300'000, 6'000'000};
    speaksOn = speaks(stream, kSizes[stream % kSizes.size()]);
  }
  isOver = true;
  trouble.join();
  EXPECT_TRUE(speaksOn) << "after " << resets << " resets";
}

TEST_F(EncryptedTransportTest, WhatWasRecordedCannotBeSaidAgain) {
  join(bySecret(), bySecret(), true);
  Bytes received(1000);
  const auto first = receive(0, 1, received);
  const Bytes sent = pattern(1000, 3);
  const auto sending = send(1, 1, sent);
  ASSERT_TRUE(comes(*signal_, [&] { return first->state().isComplete(); }));
  const Bytes recorded = proxy_->seen();
  const int replayed = connectTo(first_->address().address);
  ASSERT_EQ(::send(replayed, recorded.data(), recorded.size(), MSG_NOSIGNAL), static_cast<ssize_t>(recorded.size()));
  // It is turned away, and nobody else notices.
  pollfd ended{.fd = replayed, .events = POLLIN, .revents = 0};
  Bytes answer(10'000);
  ssize_t size = 1;
  while (size > 0 && poll(&ended, 1, 10'000) == 1) size = recv(replayed, answer.data(), answer.size(), 0);
  EXPECT_LE(size, 0) << "it is still connected";
  close(replayed);
  EXPECT_TRUE(speaks(2, 1000));
}

TEST_F(EncryptedTransportTest, WhoHasAnotherSecretHearsWhatToCheck) {
  join(bySecret(), bySecret("another secret"));
  const std::string error = errorOfOpening();
  EXPECT_NE(error.find("BAGUA_JOB_SECRET"), std::string::npos) << error;
  EXPECT_EQ(error.find("another secret"), std::string::npos) << error;
  expectNothingHeard();
}

TEST_F(EncryptedTransportTest, WhoHasNoSecretIsNotHeard) {
  join(bySecret(), nullptr);
  const Bytes sent = pattern(100, 3);
  const auto sending = send(1, 1, sent);
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (!groups_[1]->findLost() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(groups_[1]->findLost());
  expectNothingHeard();
}

TEST_F(EncryptedTransportTest, NothingIsSaidToAPeerWithoutASecret) {
  join(nullptr, bySecret());
  const std::string error = errorOfOpening();
  EXPECT_NE(error.find("BAGUA_JOB_SECRET"), std::string::npos) << error;
  expectNothingHeard();
}

TEST_F(EncryptedTransportTest, ACertificateIsNoSubstituteForTheSecret) {
  // Who opens the connection knows the secret, who takes it shows a certificate; and the other way round.
  join(byCertificate(), bySecret());
  EXPECT_NE(errorOfOpening().find("BAGUA_JOB_SECRET"), std::string::npos) << errorOfOpening();
  expectNothingHeard();
  join(bySecret(), byCertificate());
  EXPECT_NE(errorOfOpening().find("BAGUA_JOB_SECRET"), std::string::npos) << errorOfOpening();
  expectNothingHeard();
  join(byCertificate(), byCertificate("rank", "another secret"));
  EXPECT_NE(errorOfOpening().find("another job secret"), std::string::npos) << errorOfOpening();
  expectNothingHeard();
}

TEST_F(EncryptedTransportTest, ACertificateOfAnotherAuthorityIsRefusedByBothSides) {
  for (const bool isOpening : {false, true}) {
    join(byCertificate(isOpening ? "rank" : "stranger"), byCertificate(isOpening ? "stranger" : "rank"));
    const std::string error = errorOfOpening();
    EXPECT_NE(error.find("no TLS connection"), std::string::npos) << error;
    expectNothingHeard();
  }
}

// As many at a time as the system lets wait, silent, or with the first bytes of somebody who might belong here.
TEST_F(EncryptedTransportTest, TenThousandStrangersDisturbNobody) {
  join(bySecret(), bySecret());
  ASSERT_TRUE(speaks(1, 1000));
  const size_t filesBefore = openFiles();
  std::atomic<bool> isOver = false;
  std::atomic<int> strangers = 0;
  std::thread siege([&] {
    std::deque<UnsharedFile> waiting;
    const Bytes greeting{0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3};
    const Hello hello{.from = {1, 2}, .to = first_->address().process, .link = 3};
    for (; strangers < 10'000; ++strangers) {
      waiting.emplace_back(connectTo(first_->address().address));
      if (strangers % 3 == 1) ::send(waiting.back().number(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
      if (strangers % 3 == 2) ::send(waiting.back().number(), &hello, sizeof(hello), MSG_NOSIGNAL);
      if (waiting.size() > 300) waiting.pop_front();
    }
    isOver = true;
  });
  uint64_t stream = 1;
  uint64_t group = 100;
  while (!isOver) {
    ASSERT_TRUE(speaks(++stream, 100'000));
    // A process that comes in the middle of it is let in.
    const auto newcomer = Transport::listenAt("127.0.0.1", 1, bySecret());
    const std::vector<ProcessAddress> ranks{first_->address(), newcomer->address()};
    const auto host = first_->join(++group, 0, ranks);
    const auto guest = newcomer->join(group, 1, ranks);
    const Bytes sent = pattern(1000, 3);
    Bytes received(1000);
    const auto receiving = host->receive(1, 1, 0, {.data = received.data(), .size = 1000, .signal = signal_});
    const auto sending = guest->send(0, 1, 0, {.data = sent.data(), .size = 1000, .ready = 1000, .signal = signal_});
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); })) << receiving->state().error;
  }
  siege.join();
  EXPECT_EQ(strangers, 10'000);
  // Those that still wait, on both sides of it, and not one for each that came.
  EXPECT_LT(openFiles(), filesBefore + 2500);
  EXPECT_TRUE(speaks(++stream, 1 << 20));
}

}  // namespace
}  // namespace bagua::net
