// SPDX-License-Identifier: Apache-2.0
#include "backend/net/event_loop.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <future>
#include <utility>

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

class Calls final : public EventLoop::Handler {
 public:
  explicit Calls(std::function<void()> call) : call_(std::move(call)) {}
  void onReadable() override { call_(); }
  void onWritable() override {}

 private:
  const std::function<void()> call_;
};

class Pair {
 public:
  Pair() {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    own_ = UnsharedFile(ends[0]);
    other_ = UnsharedFile(ends[1]);
  }
  [[nodiscard]] int number() const { return own_.number(); }
  void makeReadable() const { EXPECT_EQ(send(other_.number(), "1", 1, MSG_NOSIGNAL), 1); }

 private:
  UnsharedFile own_;
  UnsharedFile other_;
};

// Two sockets have something to read. Whichever comes first closes the other, whose descriptor a third one gets.
TEST(EventLoop, WhatAnEventIsForDoesNotPassToAnotherSocketWithItsDescriptor) {
  EventLoop loop;
  const std::array<Pair, 2> both;
  const Pair third;
  int strayCalls = 0;
  std::promise<void> isOver;
  const auto replace = [&](int own, int other) {
    return std::make_shared<Calls>([&, own, other] {
      loop.remove(own);
      loop.remove(other);
      EXPECT_EQ(dup2(third.number(), other), other);
      loop.add(other, std::make_shared<Calls>([&] { ++strayCalls; }), false);
      loop.callLater(100ms, [&] { isOver.set_value(); });
    });
  };
  for (const auto& pair : both) pair.makeReadable();
  // The loop hears of both at once: it does not look while a call runs.
  loop.callLater(0ms, [&] {
    loop.add(both[0].number(), replace(both[0].number(), both[1].number()), false);
    loop.add(both[1].number(), replace(both[1].number(), both[0].number()), false);
  });
  EXPECT_EQ(isOver.get_future().wait_for(10s), std::future_status::ready);
  loop.stop();
  EXPECT_EQ(strayCalls, 0);
}

}  // namespace
}  // namespace bagua::net
