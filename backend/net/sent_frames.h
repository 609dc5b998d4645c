// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "backend/net/outbox.h"

namespace bagua::net {

// What one connection has been given to carry, until the other side has told that it has come: see Hello. It knows no
// socket. Its owner guards it by the mutex of the Outbox.
class SentFrames {
 public:
  // The connection takes another counted frame.
  void give() { ++given_; }
  // The kernel has all of it. Frames come here in the order in which they were given.
  void keep(OutgoingFrame frame);
  // The other side has received so many. Returns false where it says more than it can have, or less than before.
  bool acknowledge(uint64_t received);
  // The connection has ended, and the other side has said its last word: the rest has to be sent again.
  std::vector<OutgoingFrame> takeUnreceived();
  // Copies what stays in the message before `end`.
  void copyPayloads(const Outgoing& message, uint64_t end);
  void clear() { kept_.clear(); }

  [[nodiscard]] bool isEmpty() const { return acknowledged_ == given_; }
  [[nodiscard]] bool hasAny() const { return given_ > 0; }
  [[nodiscard]] uint64_t unacknowledged() const { return given_ - acknowledged_; }
  // Returns whether this holds for a frame that is not acknowledged. One that the kernel does not have yet counts, too,
  // whatever it is.
  [[nodiscard]] bool anyUnacknowledged(const std::function<bool(const OutgoingFrame& frame)>& holds) const {
    return unacknowledged() > kept_.size() || std::ranges::any_of(kept_, holds);
  }

 private:
  uint64_t given_ = 0;
  uint64_t written_ = 0;
  uint64_t acknowledged_ = 0;
  // The last of those that were written.
  std::deque<OutgoingFrame> kept_;
};

}  // namespace bagua::net
