// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/net/frame.h"
#include "backend/net/signal.h"
#include "backend/net/unsolicited_budget.h"

namespace bagua::net {

// A receiver wants a message here.
struct Place {
  uint8_t* data = nullptr;
  // The bytes of the message; or the most that it may have, where the receiver does not know how many (`isMost`).
  uint64_t size = 0;
  bool isMost = false;
  // The bytes at `data`. Where they are fewer than the message has, it goes round: byte i lies at i % room, and the
  // receiver says what it has used (Incoming::use). The room is then at least kEagerBytes, which come unsolicited.
  uint64_t room = 0;
  // Decides by the context that came with the message whether it may be written there; not set: always.
  std::function<bool(const std::vector<uint8_t>& context)> accepts = nullptr;
  // The signal is notified of the context, of the end, and of an error; with `tellsProgress`, of every frame. Waking a
  // thread costs more than all else that is done with a frame.
  std::shared_ptr<Signal> signal = nullptr;
  bool tellsProgress = false;
};

// A message that is expected or that has begun to come. Its frames may arrive in any order. What comes before a place
// for it is known, or before its context, is kept: kEagerBytes bounds that, or the room at its place, and
// kUnsolicitedBytes bounds what is kept of all messages without a place. Any thread may call.
class Incoming {
 public:
  // A message has come this far.
  struct State {
    // Unknown before the first frame.
    std::optional<uint64_t> total;
    // The bytes from its beginning that have all arrived.
    uint64_t arrived = 0;
    // The frame with the context has come, and the receiver has accepted it.
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

  // Returns a message whose bytes are thrown away.
  static std::shared_ptr<Incoming> unwanted();

  // --- The receiver calls these.
  void expectAt(Place place);
  // The receiver needs the first `bytes` no longer: there is room for as many at the end.
  void use(uint64_t bytes);
  // Nothing is written to the place from here on.
  void cancel();
  [[nodiscard]] State state();
  [[nodiscard]] std::vector<uint8_t> context();

  // --- The connection calls these. A frame begins; false: it contradicts what came before, or is sent too early.
  // `budget` is the sender's, and null for a frame that is not unsolicited.
  bool begin(const Frame& frame, const std::vector<uint8_t>& context, const std::shared_ptr<UnsolicitedBudget>& budget);
  // Calls read(place, most): `most` bytes of payload, of the `size` from `offset` on, belong at `place`, which is null
  // where nobody wants them. The place stays valid while `read` runs.
  void readInto(uint64_t offset, uint64_t size, const std::function<void(uint8_t* place, uint64_t most)>& read);
  // All payload of the frame has been read.
  void end(const Frame& frame);
  void fail(const std::string& error);

 private:
  void notify();
  // The sender is to hear this, once the mutex is free.
  struct Answer {
    std::shared_ptr<UnsolicitedBudget> budget;
    MessageKey key;
    uint64_t released = 0;
    bool grantsPlace = false;
  };
  static void give(const Answer& answer);
  // These are called under the mutex.
  Answer answer();
  [[nodiscard]] bool isComplete() const;
  bool chargeFor(const Frame& frame, const std::shared_ptr<UnsolicitedBudget>& budget);
  // Returns how many bytes from the beginning the sender may have sent by now.
  [[nodiscard]] uint64_t allowed() const;
  void accept();
  // Whether the message, which has begun to come, is one that the receiver has the place for.
  [[nodiscard]] bool fits() const { return place_->isMost ? *total_ <= place_->size : *total_ == place_->size; }
  void merge(uint64_t begin, uint64_t end);
  // Returns where byte `offset` belongs, and how many follow it in one piece.
  [[nodiscard]] std::pair<uint8_t*, uint64_t> placeOf(uint64_t offset);

  std::mutex mutex_;
  std::optional<uint64_t> total_;
  bool hasContext_ = false;
  bool isAccepted_ = false;
  std::vector<uint8_t> context_;
  std::string error_;
  // The ranges that have arrived, merged: begin -> end.
  std::map<uint64_t, uint64_t> arrived_;
  bool isCancelled_ = false;
  std::optional<Place> place_;
  uint64_t used_ = 0;
  // The bytes that have come before they could be put in their place.
  std::vector<uint8_t> kept_;
  MessageKey key_;
  // Null before the first unsolicited frame; of it, what this message has not released yet.
  std::shared_ptr<UnsolicitedBudget> budget_;
  uint64_t charged_ = 0;
  // The sender waits for a place.
  bool isAwaited_ = false;
};

}  // namespace bagua::net
