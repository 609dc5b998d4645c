// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "backend/net/frame.h"

namespace bagua::net {

// A receiver controls through this how much a sender sends. Any thread may call.
class FlowControl {
 public:
  FlowControl() = default;
  virtual ~FlowControl() = default;
  FlowControl(const FlowControl&) = delete;
  FlowControl& operator=(const FlowControl&) = delete;

  // The receiver has a place for the first `bytes` of the message.
  virtual void grantPlace(uint64_t group, const MessageKey& key, uint64_t bytes) = 0;
  // The receiver has released `bytes` of those that came unsolicited for the group.
  virtual void grantCredit(uint64_t group, uint64_t bytes) = 0;
};

// Bytes of one group that one peer has sent before a receive was posted: see kUnsolicitedBytes. Any thread may call.
class UnsolicitedBudget {
 public:
  UnsolicitedBudget(std::weak_ptr<FlowControl> sender, uint64_t group) : sender_(std::move(sender)), group_(group) {}

  // Returns false where these bytes are more than a peer may send without credit.
  [[nodiscard]] bool charge(uint64_t bytes);
  // So many bytes have a place now, or are not wanted. The sender gets credit once kCreditBytes of it have gathered: a
  // credit per frame would double the number of frames.
  void release(uint64_t bytes);
  // Gives the sender credit for all that has been released, if that is at least `minimum`.
  void grantCredit(uint64_t minimum = 1);
  // A message that waits gets a place for all that may come unsolicited.
  void grantPlace(const MessageKey& key);

 private:
  const std::weak_ptr<FlowControl> sender_;
  const uint64_t group_;
  std::mutex mutex_;
  // Charged and not credited; of these, what has been released.
  uint64_t charged_ = 0;
  uint64_t released_ = 0;
};

}  // namespace bagua::net
