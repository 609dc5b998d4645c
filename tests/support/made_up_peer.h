// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "backend/net/greeting.h"
#include "backend/net/transport.h"
#include "tests/support/open_sockets.h"
#include "tests/support/wire_tests.h"

namespace bagua::net {

// A process of another kind: a test says what it likes.
class MadeUpPeer : public ::testing::Test {
 protected:
  explicit MadeUpPeer(int mostConnections = 1, std::chrono::milliseconds patience = kPatienceWithSilence,
                      std::shared_ptr<const Encryption> encryption = nullptr, config::PortRange ports = {})
      : listening_(listenAt("127.0.0.1", ports)),
        transport_(Transport::listenAt("127.0.0.1", mostConnections, std::move(encryption), patience)) {}
  void SetUp() override {
    group_ = transport_->join(7, 0, {transport_->address(), {kPeer, addressOf(listening_)}});
    group_->watch(1);
  }
  // Opens a connection itself, from an address of this host.
  [[nodiscard]] UnsharedFile come(const std::string& from, uint64_t number, uint64_t link = 5) const {
    UnsharedFile socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const SocketAddress own(from, 0);
    const auto to = transport_->address().address;
    EXPECT_EQ(bind(socket.number(), own.get(), own.size()), 0);
    EXPECT_EQ(connect(socket.number(), to.get(), to.size()), 0);
    const Hello hello{.from = kPeer, .to = transport_->address().process, .link = link, .connection = number};
    EXPECT_EQ(::send(socket.number(), &hello, sizeof(hello), MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(hello)));
    return socket;
  }
  // The next connection of the transport, and what it says first.
  UnsharedFile accept() {
    UnsharedFile accepted;
    for (const auto end = std::chrono::steady_clock::now() + kLimit; !accepted.isOpen();) {
      accepted = UnsharedFile(accept4(listening_.number(), nullptr, nullptr, SOCK_CLOEXEC));
      if (std::chrono::steady_clock::now() > end) break;
      if (!accepted.isOpen()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const timeval limit{.tv_sec = kLimit.count(), .tv_usec = 0};
    setsockopt(accepted.number(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    EXPECT_EQ(recv(accepted.number(), &hello_, sizeof(hello_), MSG_WAITALL), static_cast<ssize_t>(sizeof(hello_)));
    return accepted;
  }
  void answer(const UnsharedFile& connection, Hello hello) const {
    hello.to = hello_.from;
    hello.connection = hello_.connection;
    const auto bytes = answerOf(hello);
    EXPECT_EQ(::send(connection.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  static void say(const UnsharedFile& connection, const Frame& frame) {
    ::send(connection.number(), &frame, sizeof(frame), MSG_NOSIGNAL);
  }
  static Frame hear(const UnsharedFile& connection) {
    Frame frame;
    EXPECT_EQ(recv(connection.number(), &frame, sizeof(frame), MSG_WAITALL), static_cast<ssize_t>(sizeof(frame)));
    return frame;
  }
  static void sayBytes(const UnsharedFile& connection, const Bytes& bytes) {
    EXPECT_EQ(::send(connection.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  static Bytes hearBytes(const UnsharedFile& connection, size_t size) {
    Bytes bytes(size);
    EXPECT_EQ(recv(connection.number(), bytes.data(), size, MSG_WAITALL), static_cast<ssize_t>(size));
    return bytes;
  }
  // The answer to a connection that has come.
  static Hello hearWelcome(const UnsharedFile& connection) {
    EXPECT_EQ(hear(connection).kind, Frame::Kind::kWelcome);
    return fromBytes<Hello>(hearBytes(connection, sizeof(Hello))).value();
  }
  // Resets the connection that hello_ was for. Returns the next one, over which both have said of it that nothing came.
  UnsharedFile replace(const UnsharedFile& connection) {
    const uint64_t number = hello_.connection;
    reset(connection);
    auto next = accept();
    answer(next, {.from = kPeer, .link = 5});
    EXPECT_EQ(hear(next).kind, Frame::Kind::kEnded);
    say(next, {.kind = Frame::Kind::kEnded, .key = {.stream = number}, .total = 0});
    return next;
  }
  [[nodiscard]] std::string lost() const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!group_->findLost() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return group_->findLost().value_or("nothing is lost");
  }

  static constexpr ProcessId kPeer{1, 2};
  static constexpr std::chrono::seconds kLimit{10};
  const UnsharedFile listening_;
  const std::shared_ptr<Transport> transport_;
  std::shared_ptr<Group> group_;
  Hello hello_;
};

}  // namespace bagua::net
