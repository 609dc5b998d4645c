// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backend/net/frame.h"
#include "backend/net/signal.h"

namespace bagua::net {

// Where a receiver wants a message.
struct Place {
  uint8_t* data = nullptr;
  // Bytes of the message.
  uint64_t size = 0;
  // Bytes at `data`. Where they are fewer than the message has, it goes round: byte i lies at i % room, and the
  // receiver says what it has used (Incoming::use). No fewer than kEagerBytes then, which come unasked.
  uint64_t room = 0;
  // Whether what came with the message allows it to be written there. Not set: it does.
  std::function<bool(const std::vector<uint8_t>& context)> accepts = nullptr;
  // Told of every change.
  std::shared_ptr<Signal> signal = nullptr;
};

// The way back to whoever sends.
class Answers {
 public:
  Answers() = default;
  virtual ~Answers() = default;
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;

  // There is a place for the first `bytes` of the message.
  virtual void tellPlace(uint64_t group, const MessageKey& key, uint64_t bytes) = 0;
  virtual void tellCredit(uint64_t group, uint64_t bytes) = 0;
};

// What one peer has sent of one group's messages without being asked: see kUnaskedBytes.
class Unasked {
 public:
  Unasked(std::weak_ptr<Answers> sender, uint64_t group) : sender_(std::move(sender)), group_(group) {}

  // False: more than a peer may send.
  [[nodiscard]] bool come(uint64_t bytes);
  // As many have a place now, or are not wanted. Gives credit when there is enough of it.
  void take(uint64_t bytes);
  void tellCredit(uint64_t least = 1);
  // To a message that waits: for all that may come unasked.
  void tellPlace(const MessageKey& key);

 private:
  const std::weak_ptr<Answers> sender_;
  const uint64_t group_;
  std::mutex mutex_;
  // For which no credit was given; of these, what has been taken.
  uint64_t charged_ = 0;
  uint64_t taken_ = 0;
};

// A message that is expected or that has begun to come. Its frames may arrive in any order. What comes before anybody
// has a place for it, or before its context, is kept: kEagerBytes bounds that, or the room at its place, and
// kUnaskedBytes what is kept of all messages for which nobody has a place.
class Incoming {
 public:
  // Where a message stands.
  struct State {
    // Unknown before its first frame.
    std::optional<uint64_t> total;
    // Bytes from its beginning that are all there.
    uint64_t arrived = 0;
    // Whether the frame with the context has come, and what the receiver said to it.
    bool hasContext = false;
    bool isAccepted = false;
    // Not empty: nothing more will come.
    std::string error;

    [[nodiscard]] bool isComplete() const { return total && hasContext && arrived == *total; }
  };

  Incoming() = default;
  ~Incoming();
  Incoming(const Incoming&) = delete;
  Incoming& operator=(const Incoming&) = delete;

  // What comes of it is thrown away.
  static std::shared_ptr<Incoming> unwanted();

  // The receiver.
  void expectAt(Place place);
  // The first `bytes` are no longer needed: room for as many at the end.
  void use(uint64_t bytes);
  // From here on nothing is written to the place.
  void cancel();
  [[nodiscard]] State state();
  [[nodiscard]] std::vector<uint8_t> context();

  // The connection. A frame begins: false where it contradicts what came before, or is sent too early. `unasked` is the
  // sender's, null for a frame that needs none.
  bool begin(const Frame& frame, const std::vector<uint8_t>& context, const std::shared_ptr<Unasked>& unasked);
  // Calls read(place, most): `most` bytes of payload, of the `size` from `offset` on, belong at `place`, which is null
  // where nobody wants them. The place stays valid while `read` runs.
  void readInto(uint64_t offset, uint64_t size, const std::function<void(uint8_t* place, uint64_t most)>& read);
  // All payload of a frame is there.
  void end(const Frame& frame);
  void fail(const std::string& error);

 private:
  void notify();
  // What its sender is to hear, once the mutex is free.
  struct Answer {
    std::shared_ptr<Unasked> unasked;
    MessageKey key;
    uint64_t taken = 0;
    bool tellsPlace = false;
  };
  static void give(const Answer& answer);
  // Under the mutex.
  Answer answer();
  [[nodiscard]] bool isComplete() const;
  bool noteUnasked(const Frame& frame, const std::shared_ptr<Unasked>& unasked);
  // Bytes from the beginning that the sender may have sent by now.
  [[nodiscard]] uint64_t allowed() const;
  void accept();
  // Where byte `offset` belongs, with how many after it in one piece.
  [[nodiscard]] std::pair<uint8_t*, uint64_t> placeOf(uint64_t offset);

  std::mutex mutex_;
  std::optional<uint64_t> total_;
  bool hasContext_ = false;
  bool isAccepted_ = false;
  std::vector<uint8_t> context_;
  std::string error_;
  // Begin -> end of what has arrived, merged.
  std::map<uint64_t, uint64_t> arrived_;
  bool isCancelled_ = false;
  std::optional<Place> place_;
  uint64_t used_ = 0;
  // What has come before it could be put in its place.
  std::vector<uint8_t> kept_;
  MessageKey key_;
  // Null before a frame that needs it. Of it, what this message has not taken yet.
  std::shared_ptr<Unasked> unasked_;
  uint64_t charged_ = 0;
  // Whether the sender waits for a place.
  bool isAwaited_ = false;
};

// The messages of one group that are on their way to this rank. Any thread may call.
class Inbox {
 public:
  // For the receiver: the message, whether something of it has come or not.
  std::shared_ptr<Incoming> find(const MessageKey& key);
  // For the connection: the message that a frame belongs to, which begins to come with it. One that nobody wants, if
  // the receiver has retired its stream; null where the frame contradicts what came before it.
  std::shared_ptr<Incoming> begin(const Frame& frame, const std::vector<uint8_t>& context,
                                  const std::shared_ptr<Answers>& sender);
  void forget(const MessageKey& key);
  // Nobody will ask for what still comes of this stream. Streams that count up from 0 are retired about in their order.
  void retire(uint64_t stream);
  // The first of `keys` of which something has come; empty: none. `signal` is told of whatever begins to come later.
  std::optional<MessageKey> firstBegun(const std::vector<MessageKey>& keys, const std::shared_ptr<Signal>& signal);
  // Messages of `source` that are not complete, and all that are asked for later, fail. The first error stays.
  void failAllOf(uint32_t source, const std::string& error);
  // Why nothing more comes from `source`, if so.
  [[nodiscard]] std::string errorOf(uint32_t source);
  // `source` has sent `frames` data frames in all and nothing after them; `error` is what to say to whoever waits.
  void noteLeave(uint32_t source, uint64_t frames, const std::string& error);
  void noteFrame(uint32_t source);

 private:
  struct Source {
    uint64_t frames = 0;
    std::optional<uint64_t> lastFrame = {};
    std::string leaveError = {};
    std::string error = {};
    std::shared_ptr<Unasked> unasked = nullptr;
  };
  std::shared_ptr<Unasked> unaskedOf(const Frame& frame, const std::shared_ptr<Answers>& sender);
  std::shared_ptr<Incoming> arriving(const MessageKey& key);
  void failIfLeft(uint32_t source);
  [[nodiscard]] bool isRetired(uint64_t stream) const { return stream < retiredBelow_ || retired_.contains(stream); }

  std::mutex mutex_;
  std::map<MessageKey, std::shared_ptr<Incoming>> messages_;
  std::map<uint32_t, Source> sources_;
  uint64_t retiredBelow_ = 0;
  std::set<uint64_t> retired_;
  std::vector<std::weak_ptr<Signal>> watchers_;
};

}  // namespace bagua::net
