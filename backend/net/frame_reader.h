// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
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
  // Takes a frame that carries no message.
  virtual void control(const Frame& frame, const std::vector<uint8_t>& context) = 0;
  // Has `read` look at the payload in a cell of the sender's memory, which is free afterwards. Returns false where the
  // sender has told of no memory.
  virtual bool readCell(uint32_t cell, const std::function<void(const uint8_t* payload)>& read) = 0;
};

// Reads frames from a socket and puts their payload where it belongs. On the loop's thread only.
class FrameReader {
 public:
  // kDry: there is no more for now. kError: the text is in error().
  enum class Result { kMore, kDry, kEnd, kError };
  // Reads what is there, but so much at most that other connections have their turn.
  Result read(Stream& stream, FrameSink& sink);
  [[nodiscard]] const std::string& error() const { return error_; }
  // Returns whether the peer's end came in the middle of a frame.
  [[nodiscard]] bool isInFrame() const { return isInPayload_ || filled_ > used_; }

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
  Result failWith(std::string text);

  // Headers and small payloads are read ahead into here. It is not zeroed, so that a connection takes no more memory
  // than it uses.
  std::array<uint8_t, 64U << 10U> buffer_;
  size_t used_ = 0;
  size_t filled_ = 0;
  Frame frame_;
  bool isInPayload_ = false;
  uint64_t payloadRead_ = 0;
  Delivery delivery_;
  std::string error_;
};

}  // namespace bagua::net
