// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backend/net/frame.h"
#include "backend/net/incoming.h"
#include "backend/net/signal.h"
#include "backend/net/unsolicited_budget.h"

namespace bagua::net {

// The messages of one group that are on their way to this rank. Any thread may call.
class Inbox {
 public:
  // The receiver asks for a message, whether something of it has come or not.
  std::shared_ptr<Incoming> find(const MessageKey& key);
  // A connection asks for the message that a frame belongs to, and begins the frame. The result throws its bytes away
  // if the receiver has retired the stream; it is null where the frame contradicts what came before it.
  std::shared_ptr<Incoming> begin(const Frame& frame, const std::vector<uint8_t>& context,
                                  const std::shared_ptr<FlowControl>& sender);
  void forget(const MessageKey& key);
  // The receiver will ask for nothing more of this stream. Streams that count up from 0 are retired about in their
  // order, so that few numbers have to be remembered.
  void retire(uint64_t stream);
  // Returns the first of `keys` of which something has come. If there is none, `signal` is notified of whatever begins
  // to come later.
  std::optional<MessageKey> firstBegun(const std::vector<MessageKey>& keys, const std::shared_ptr<Signal>& signal);
  // Messages of `source` that are not complete fail, and so do all that are asked for later. The first error stays.
  void failAllOf(uint32_t source, const std::string& error);
  // Does so for the sources of which something has come over `sender`, which has nothing more.
  void failAllOver(const FlowControl& sender, const std::string& error);
  // Returns whether the loss of `sender` concerns `source`: something has come over it, or is asked for and would come
  // over it, as the group does not speak over another one.
  [[nodiscard]] bool uses(const FlowControl& sender, uint32_t source, bool hasAnother);
  // Returns why nothing more comes from `source`; empty: it may.
  [[nodiscard]] std::string errorOf(uint32_t source);
  // `signal` is notified when there is such an error, if there is none yet.
  void watchErrorOf(uint32_t source, const std::shared_ptr<Signal>& signal);
  // `source` has sent `frames` data frames in all and nothing after them; `error` is what waiters get to hear.
  void noteLeave(uint32_t source, uint64_t frames, const std::string& error);
  // A data frame of `source` has come to its end.
  void noteFrame(uint32_t source);
  // The group was left. Of a frame that is just coming, hasHeardFrom() after this or isClosed() after begin() tells.
  void close() { isClosed_ = true; }
  [[nodiscard]] bool isClosed() const { return isClosed_; }
  // `source` has asked over `sender` to be told of this rank's leave.
  void noteAsking(uint32_t source, const FlowControl& sender);
  // Returns whether something has come over `sender`, or somebody has asked there.
  [[nodiscard]] bool hasHeardFrom(const FlowControl& sender);

 private:
  struct Source {
    uint64_t frames = 0;
    std::optional<uint64_t> lastFrame = {};
    std::string leaveError = {};
    std::string error = {};
    std::shared_ptr<UnsolicitedBudget> budget = nullptr;
    // The last that has brought a frame: an address to compare with, which may have gone.
    const FlowControl* sender = nullptr;
    // They are notified of the error.
    std::vector<std::weak_ptr<Signal>> watchers = {};

    // Frames overtake each other: the last has come when as many have.
    [[nodiscard]] bool hasLeft() const { return lastFrame && frames >= *lastFrame; }
  };
  // These are called under the mutex.
  [[nodiscard]] bool isRetired(uint64_t stream) const { return stream < retiredBelow_ || retired_.contains(stream); }
  [[nodiscard]] std::vector<std::shared_ptr<Signal>> watching() const;

  std::mutex mutex_;
  std::map<MessageKey, std::shared_ptr<Incoming>> messages_;
  std::map<uint32_t, Source> sources_;
  uint64_t retiredBelow_ = 0;
  std::set<uint64_t> retired_;
  std::vector<std::weak_ptr<Signal>> watchers_;
  std::atomic<bool> isClosed_ = false;
};

// A frame goes to these: its message, which is null where the frame is refused, and the inbox that counts it; that is
// null where the group was left.
struct Delivery {
  std::shared_ptr<Incoming> message;
  std::shared_ptr<Inbox> inbox;
};

}  // namespace bagua::net
