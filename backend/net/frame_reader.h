// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/net/frame.h"
#include "backend/net/inbox.h"
#include "backend/net/stream.h"

namespace bagua::net {

// A FrameReader hands to this what it reads.
class FrameSink {
 public:
  FrameSink() = default;
  virtual ~FrameSink() = default;
  FrameSink(const FrameSink&) = delete;
  FrameSink& operator=(const FrameSink&) = delete;

  // Returns where the payload of a data frame goes. Without a message, the frame is refused, and the connection with
  // it.
  virtual Delivery begin(const Frame& frame, const std::vector<uint8_t>& context) = 0;
  // Takes a frame that carries no message. Returns false where it is refused, and the connection with it.
  virtual bool control(const Frame& frame, const std::vector<uint8_t>& context) = 0;
  // The other side has received so many frames of this connection. Returns false where that cannot be.
  virtual bool acknowledge(uint64_t received) = 0;
  // Has `read` look at the payload in a cell of the sender's memory, which is free afterwards. Returns false where the
  // sender has told of no memory.
  virtual bool readCell(uint32_t cell, const std::function<void(const uint8_t* payload)>& read) = 0;
};

// Reads frames from a socket and puts their payload where it belongs. On the loop's thread only.
class FrameReader {
 public:
  // kDry: there is no more for now. kBroken: the connection is. kWrong: what has come is. The text is in error().
  enum class Result { kMore, kDry, kEnd, kBroken, kWrong };
  // Reads what is there, but so much at most that other connections have their turn.
  Result read(Stream& stream, FrameSink& sink);
  [[nodiscard]] const std::string& error() const { return error_; }
  // The system's, of a connection that is broken.
  [[nodiscard]] int errorNumber() const { return errorNumber_; }
  // Returns whether the peer's end came in the middle of a frame.
  [[nodiscard]] bool isInFrame() const { return isInPayload_ || filled_ > used_; }
  // Returns the frame that the sink has begun, and whose payload has not all come; null: there is none.
  [[nodiscard]] const Frame* unfinished() const { return isInPayload_ ? &frame_ : nullptr; }
  // Returns how many counted frames have come whole; and what they weigh for whoever keeps them: their payload, and
  // kFrameWeight each. Any thread may ask.
  static constexpr uint64_t kFrameWeight = 16U << 10U;
  [[nodiscard]] uint64_t frames() const { return frames_; }
  [[nodiscard]] uint64_t weight() const { return weight_; }

 private:
  // Each returns false where it cannot go on: because of an error, or takeBuffered() because the payload is not
  // complete.
  bool parse(FrameSink& sink);
  bool beginFrame(FrameSink& sink);
  bool takeBuffered();
  bool takeCell(FrameSink& sink);
  void endFrame();
  Result readPayload(Stream& stream, bool mayAskSocket);
  Result fill(Stream& stream, bool mayAskSocket);
  void count();
  // Says what a read that has brought nothing means.
  Result nothingRead(ssize_t size, int error);

  // Headers and small payloads are read ahead into here. It is not zeroed, so that a connection takes no more memory
  // than it uses.
  std::array<uint8_t, 64U << 10U> buffer_;
  size_t used_ = 0;
  size_t filled_ = 0;
  Frame frame_;
  bool isInPayload_ = false;
  uint64_t payloadRead_ = 0;
  Delivery delivery_;
  uint64_t acknowledged_ = 0;
  std::atomic<uint64_t> frames_ = 0;
  std::atomic<uint64_t> weight_ = 0;
  std::string error_;
  int errorNumber_ = 0;
};

}  // namespace bagua::net
