// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "backend/net/frame.h"
#include "backend/net/signal.h"

namespace bagua::net {

// A sender wants this to go.
struct Message {
  const uint8_t* data = nullptr;
  uint64_t size = 0;
  // The first so many bytes may leave at once; more, as the sender makes them ready.
  uint64_t ready = 0;
  std::vector<uint8_t> context = {};
  // The signal is notified when all bytes have gone; with `tellsProgress`, of every frame.
  bool tellsProgress = false;
  std::shared_ptr<Signal> signal = nullptr;
  // The message leaves the rest of what the group may send to the peer unsolicited to others.
  uint64_t maxUnsolicited = kUnsolicitedBytes;
};

// A message on its way out, with the group that sends it. An Outbox writes the rest, and Link `ready`, under the link's
// mutex; other threads read it through Link::stateOf().
struct Outgoing : Message {
  uint64_t group = 0;
  MessageKey key;

  // The bytes from the beginning that the receiver lets come; of these, for how many it has announced a place. The
  // others need room in the group's account.
  uint64_t allowed = kEagerBytes;
  uint64_t placed = 0;
  // The bytes from the beginning that have been cut into frames, and where those of them begin that are being written,
  // in ascending order.
  uint64_t cut = 0;
  std::vector<uint64_t> writing = {};
  // The kernel has so many bytes: a count, as frames overtake each other.
  uint64_t sent = 0;
  // Where those of them begin that may still be read from `data`, in ascending order: those that have gone too, until
  // they are acknowledged.
  std::vector<uint64_t> reading = {};
  bool hasBegun = false;
  // The receiver has heard that the message waits.
  bool hasToldOfWaiting = false;
  // The position among the messages of the link.
  uint64_t number = 0;
  // It was added after its group was left, and stays here.
  bool isTooLate = false;

  [[nodiscard]] uint64_t sendable() const { return std::min(ready, allowed); }
  // An empty message is a frame too.
  [[nodiscard]] bool hasFrame() const { return cut < sendable() || (!hasBegun && size == 0); }
  [[nodiscard]] bool isUnsolicited() const { return size > 0 && cut >= placed; }
  // The payload of the next frame, which has room for `most`.
  [[nodiscard]] uint32_t payloadBytes(uint32_t most) const {
    const uint64_t end = isUnsolicited() ? sendable() : std::min(sendable(), placed);
    return static_cast<uint32_t>(std::min<uint64_t>(end - cut, most));
  }
  [[nodiscard]] bool isComplete() const { return hasBegun && sent == size; }
  // The bytes from the beginning that have gone.
  [[nodiscard]] uint64_t gone() const { return writing.empty() ? cut : writing.front(); }
  // The bytes from the beginning that will not be read again.
  [[nodiscard]] uint64_t released() const { return reading.empty() ? cut : reading.front(); }
  [[nodiscard]] bool hasContextGone() const { return hasBegun && (writing.empty() || writing.front() > 0); }
};

// The frame of a message that begins at `offset`, and was cut off last, is read from its memory for as long as this
// lives.
class MessageReader {
 public:
  MessageReader() = default;
  MessageReader(std::shared_ptr<Outgoing> message, uint64_t offset) : message_(std::move(message)), offset_(offset) {
    message_->reading.push_back(offset);
  }
  MessageReader(MessageReader&& other) noexcept : message_(std::move(other.message_)), offset_(other.offset_) {
    other.message_ = nullptr;
  }
  MessageReader& operator=(MessageReader&& other) noexcept {
    std::swap(message_, other.message_);
    std::swap(offset_, other.offset_);
    return *this;
  }
  ~MessageReader() {
    if (!message_) return;
    auto& reading = message_->reading;
    reading.erase(std::ranges::find(reading, offset_));
  }
  MessageReader(const MessageReader&) = delete;
  MessageReader& operator=(const MessageReader&) = delete;

  [[nodiscard]] bool exists() const { return message_ != nullptr; }

 private:
  std::shared_ptr<Outgoing> message_;
  uint64_t offset_ = 0;
};

// A frame on its way out, or kept until it is acknowledged. `message` is null where it carries none.
struct OutgoingFrame {
  Frame header;
  std::vector<uint8_t> context = {};
  std::shared_ptr<Outgoing> message = nullptr;
  // The payload stays in the message as long as there is this.
  MessageReader reader = {};
  std::shared_ptr<const uint8_t[]> copy = nullptr;
  bool isInCell = false;
  // The kernel has had all of it before.
  bool hasGone = false;

  [[nodiscard]] const uint8_t* payload() const {
    if (copy) return copy.get();
    return message ? message->data + header.offset : nullptr;
  }
  // Makes a copy of the payload, if it stays in a message before `end`.
  void copyPayload(const Outgoing& of, uint64_t end);
  void copyPayload();
};

// The messages of one process to another one, cut into frames: the oldest message first, as far as the receiver has
// places and the groups' accounts have room. It knows no connection, and outlives those that take its frames. Its owner
// guards it, the messages and all frames by one mutex.
class Outbox {
 public:
  // Chooses where the payload of a frame goes: 0 is the connection, n is cell n - 1 of shared memory. Without a value,
  // the frame waits until a cell is free.
  using ChooseCell = std::function<std::optional<uint32_t>(uint32_t payloadBytes)>;

  // The next frames have room for so much: kMostPayload at most, and at first.
  void limitPayload(uint32_t bytes) { mostPayload_ = bytes; }
  void add(const std::shared_ptr<Outgoing>& message);
  // Frames without a message leave before all others. `chooseCell` may call this.
  void addControl(const Frame& header, std::vector<uint8_t> context = {});
  // Frames that have been lost with their connection leave before all others, in their order.
  void sendAgain(std::vector<OutgoingFrame> frames);
  // Cuts off the next frame that may leave.
  std::optional<OutgoingFrame> next(const ChooseCell& chooseCell);
  // The kernel has all of a frame. Returns the signal to notify, if any.
  static std::shared_ptr<Signal> finish(OutgoingFrame& frame);
  // No more frames are cut off the message. Those that were remain.
  void cancel(const std::shared_ptr<Outgoing>& message);
  // Copies what is to be sent again and stays in the message before `end`.
  void copyPayloads(const Outgoing& message, uint64_t end);

  // The receiver has a place for the first `bytes` of a message, which may not have been added yet.
  void grantPlace(uint64_t group, const MessageKey& key, uint64_t bytes);
  void grantCredit(uint64_t group, uint64_t bytes);

  // Gives up what is still to be sent for a group. Returns how many data frames have been cut off for it.
  uint64_t leave(uint64_t group);
  // Gives up everything. Returns the signals of all messages that have not been cut off completely.
  std::vector<std::shared_ptr<Signal>> clear();

  [[nodiscard]] bool isEmpty() const { return queue_.empty() && controls_.empty() && again_.empty(); }
  [[nodiscard]] bool sendsAgain() const { return !again_.empty(); }
  [[nodiscard]] bool sendsAgain(const std::function<bool(const OutgoingFrame& frame)>& holds) const {
    return std::ranges::any_of(again_, holds);
  }
  // The bytes that may leave, for the first time or again.
  [[nodiscard]] uint64_t backlog() const;

 private:
  // The messages of a group that have begun to leave.
  struct Account {
    // The data frames so far.
    uint64_t frames = 0;
    // Charged, and not credited yet.
    uint64_t unsolicited = 0;
    // The messages that found no room, by number.
    std::map<uint64_t, std::shared_ptr<Outgoing>> waiting = {};
  };
  using Queue = std::deque<std::shared_ptr<Outgoing>>;

  // Returns whether the next frame of the message has a place, or room in the account.
  bool mayLeave(const Outgoing& message);
  void letWait(Queue::iterator message);
  OutgoingFrame cutOff(const std::shared_ptr<Outgoing>& message, Frame::Kind kind, uint32_t cell);

  // The messages in the order in which they were added, but those that have waited go first.
  Queue queue_;
  std::deque<OutgoingFrame> again_;
  std::deque<OutgoingFrame> controls_;
  // Places that the receiver has announced for messages that have not been added yet.
  std::map<std::pair<uint64_t, MessageKey>, uint64_t> placesAhead_;
  std::map<uint64_t, Account> accounts_;
  // Nothing is taken for these any more: a thread that does not know yet may still send.
  std::set<uint64_t> left_;
  uint32_t mostPayload_ = kMostPayload;
  // The messages so far.
  uint64_t added_ = 0;
};

}  // namespace bagua::net
