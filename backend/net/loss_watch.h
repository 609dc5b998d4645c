// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

#include "backend/net/socket.h"

namespace bagua::net {

// Finds out from what the kernel counts whether a line loses packets though it is not full, and how many connections
// are worth having then. Loss that has nothing to do with the load (a radio link, a long line) limits each connection:
// cubic sends 9 Mbit/s over 50 ms of round trip where 0.1 % is lost, however fast the line is, and n connections send n
// times as much. Where the line itself drops what is too much, more connections only lose more: then packets wait in
// the queue before it, or more connections show a larger share of loss.
class LossWatch {
 public:
  using Clock = std::chrono::steady_clock;

  // `line` adds up `open` connections, which have something to send. Counts that fall show that one has ended.
  void look(const Line& line, int open, Clock::time_point now);
  // Packets have been lost while the line was not full.
  [[nodiscard]] bool hasLoss() const { return hasLoss_; }
  [[nodiscard]] int worth() const { return worth_; }

 private:
  void mark(const Line& line);

  bool hasLoss_ = false;
  int worth_ = 1;
  // Where the counts stood when they were last looked at.
  uint64_t sentBefore_ = 0;
  uint64_t lostBefore_ = 0;
  // What was sent, and of that lost, while fewer connections were worth having.
  uint64_t sentByFewer_ = 0;
  uint64_t lostByFewer_ = 0;
  // What is counted after a look before this is of a queue that was full.
  Clock::time_point lookedAt_;
  Clock::time_point queueUntil_;
  // More connections did not help.
  Clock::time_point noMoreBefore_;
};

}  // namespace bagua::net
