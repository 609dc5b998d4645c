// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "backend/net/event_loop.h"
#include "backend/net/frame.h"
#include "backend/net/stream.h"

namespace bagua::net {

// Finds out once whether a process can be reached at its address: says a Hello for kNoLink, which that process refuses,
// in its name. On the loop's thread.
class Probe final : public EventLoop::Handler, public std::enable_shared_from_this<Probe> {
 public:
  enum class Result {
    kAnswered,
    // No connection gets there.
    kFiltered,
    // Connections get there, and nobody has said whose process that is.
    kUnclear
  };
  using Tell = std::function<void(Result)>;

  // Tells at the latest after `patience`.
  Probe(std::shared_ptr<EventLoop> loop, const Hello& hello, Tell tell)
      : loop_(std::move(loop)), hello_(hello), tell_(std::move(tell)) {}
  void start(const SocketAddress& to, const Encryption* encryption, std::chrono::milliseconds patience);
  // Nothing is told any more. Any thread may call.
  void stop();

  void onReadable() override { goOn(); }
  void onWritable() override { goOn(); }

 private:
  struct Answer {
    Frame frame;
    Hello hello;
  };
  void goOn();
  // Returns the result, once there is one.
  std::optional<Result> step();
  void end(std::optional<Result> result);

  const std::shared_ptr<EventLoop> loop_;
  const Hello hello_;
  const Tell tell_;
  Stream stream_;
  bool isConnected_ = false;
  bool isProtected_ = false;
  bool isOver_ = false;
  size_t said_ = 0;
  Answer answer_{};
  size_t heard_ = 0;
};

}  // namespace bagua::net
