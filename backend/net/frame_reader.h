// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/net/frame.h"
#include "backend/net/incoming.h"
#include "backend/net/stream.h"

namespace bagua::net {

// Reads frames from a socket and puts their payload where it belongs. On the loop's thread only.
class FrameReader {
 public:
  // Where the payload of a data frame goes: null refuses the frame, and the connection with it.
  using Begin = std::function<std::shared_ptr<Incoming>(const Frame& frame, const std::vector<uint8_t>& context)>;
  // A frame that carries no message.
  using Control = std::function<void(const Frame& frame, const std::vector<uint8_t>& context)>;
  // Has `read` look at the payload in a cell of the sender's memory, which is free afterwards. False where the sender
  // has told of none.
  using ReadCell = std::function<bool(uint32_t cell, const std::function<void(const uint8_t* payload)>& read)>;
  // All of a data frame is there.
  using End = std::function<void(const Frame& frame)>;

  FrameReader(Begin begin, End end, Control control, ReadCell readCell)
      : begin_(std::move(begin)), end_(std::move(end)), control_(std::move(control)), readCell_(std::move(readCell)) {}

  // kDry: there is no more for now. kError: the text is in error().
  enum class Result { kMore, kDry, kEnd, kError };
  // Reads what is there, for a while.
  Result read(Stream& stream);
  [[nodiscard]] const std::string& error() const { return error_; }
  // Whether the peer's end came in the middle of a frame.
  [[nodiscard]] bool isInFrame() const { return isInPayload_ || filled_ > used_; }

 private:
  bool parse();
  bool beginFrame();
  bool takeBuffered();
  bool takeCell();
  void endFrame();
  Result readPayload(Stream& stream, bool mayAskSocket);
  Result fill(Stream& stream, bool mayAskSocket);
  Result failWith(std::string text);

  const Begin begin_;
  const End end_;
  const Control control_;
  const ReadCell readCell_;
  // What was read ahead: headers and small payloads. Not zeroed, so that a connection takes no more memory than it
  // uses.
  std::array<uint8_t, 64U << 10U> buffer_;
  size_t used_ = 0;
  size_t filled_ = 0;
  Frame frame_;
  bool isInPayload_ = false;
  uint64_t payloadRead_ = 0;
  std::shared_ptr<Incoming> message_;
  std::string error_;
};

}  // namespace bagua::net
