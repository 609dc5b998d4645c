// SPDX-License-Identifier: Apache-2.0
#include "backend/net/frame_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace bagua::net {
namespace {

// Payload of a message that was given up is read into here.
thread_local std::array<uint8_t, 64U << 10U> discarded;

// One connection does not keep the loop from the others for longer.
constexpr int kReadsAtATime = 8;
// Payload that is at least this long is read straight to its place.
constexpr uint64_t kDirect = 16U << 10U;

}  // namespace

FrameReader::Result FrameReader::nothingRead(ssize_t size, int error) {
  if (size == 0) return Result::kEnd;
  if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) return Result::kDry;
  errorNumber_ = error;
  error_ = std::generic_category().message(error);
  return Result::kBroken;
}

// Before whoever waits for the frame hears of it: what it sends in answer then tells that the frame has come.
void FrameReader::count() {
  weight_ += frame_.payloadBytes + kFrameWeight;
  ++frames_;
}

FrameReader::Result FrameReader::read(Stream& stream, FrameSink& sink) {
  // The loop does not tell again of what the stream itself holds.
  for (int i = 0; i < kReadsAtATime || stream.hasBuffered(); ++i) {
    const bool mayAsk = i < kReadsAtATime;
    const bool isDirect = isInPayload_ && used_ == filled_ && frame_.payloadBytes - payloadRead_ >= kDirect;
    const Result result = isDirect ? readPayload(stream, mayAsk) : fill(stream, mayAsk);
    if (result != Result::kMore) return result;
    if (!parse(sink)) return Result::kWrong;
  }
  return Result::kMore;
}

FrameReader::Result FrameReader::fill(Stream& stream, bool mayAskSocket) {
  if (used_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + used_, filled_ - used_);
    filled_ -= std::exchange(used_, 0);
  }
  const ssize_t size = stream.receive(buffer_.data() + filled_, buffer_.size() - filled_, mayAskSocket);
  if (size <= 0) return nothingRead(size, errno);
  filled_ += static_cast<size_t>(size);
  return Result::kMore;
}

FrameReader::Result FrameReader::readPayload(Stream& stream, bool mayAskSocket) {
  const uint64_t left = frame_.payloadBytes - payloadRead_;
  ssize_t size = 0;
  int error = 0;
  delivery_.message->readInto(frame_.offset + payloadRead_, left, [&](uint8_t* place, uint64_t most) {
    size = place != nullptr
               ? stream.receive(place, most, mayAskSocket)
               : stream.receive(discarded.data(), std::min<uint64_t>(most, discarded.size()), mayAskSocket);
    error = errno;
  });
  if (size <= 0) return nothingRead(size, error);
  payloadRead_ += static_cast<uint64_t>(size);
  return Result::kMore;
}

// Takes all that is complete in the buffer.
bool FrameReader::parse(FrameSink& sink) {
  while (true) {
    if (!isInPayload_) {
      if (filled_ - used_ < sizeof(Frame)) return true;
      std::memcpy(&frame_, buffer_.data() + used_, sizeof(Frame));
      if (!isValid(frame_)) {
        error_ = "what came is no message of bagua";
        return false;
      }
      if (filled_ - used_ < sizeof(Frame) + frame_.contextBytes) return true;
      if (!beginFrame(sink)) return false;
      continue;
    }
    if (!takeBuffered()) return true;
  }
}

bool FrameReader::beginFrame(FrameSink& sink) {
  const auto* const context = buffer_.data() + used_ + sizeof(Frame);
  used_ += sizeof(Frame) + frame_.contextBytes;
  if (std::exchange(acknowledged_, frame_.received) != frame_.received && !sink.acknowledge(frame_.received)) {
    error_ = "frames are said to have come that were not sent";
    return false;
  }
  if (isControl(frame_)) {
    if (isCounted(frame_)) count();
    if (sink.control(frame_, {context, context + frame_.contextBytes})) return true;
    error_ = "a frame contradicts what came before it";
    return false;
  }
  delivery_ = sink.begin(frame_, {context, context + frame_.contextBytes});
  if (!delivery_.message) {
    error_ = "a message contradicts what came before it";
    return false;
  }
  if (frame_.cell > 0) return takeCell(sink);
  isInPayload_ = true;
  payloadRead_ = 0;
  return true;
}

bool FrameReader::takeBuffered() {
  uint64_t size = std::min<uint64_t>(filled_ - used_, frame_.payloadBytes - payloadRead_);
  while (size > 0) {
    delivery_.message->readInto(frame_.offset + payloadRead_, size, [&](uint8_t* place, uint64_t most) {
      if (place != nullptr) std::memcpy(place, buffer_.data() + used_, most);
      used_ += most;
      payloadRead_ += most;
      size -= most;
    });
  }
  if (payloadRead_ < frame_.payloadBytes) return false;
  isInPayload_ = false;
  endFrame();
  return true;
}

bool FrameReader::takeCell(FrameSink& sink) {
  const bool isThere = sink.readCell(frame_.cell - 1, [&](const uint8_t* payload) {
    uint64_t taken = 0;
    while (taken < frame_.payloadBytes) {
      delivery_.message->readInto(frame_.offset + taken, frame_.payloadBytes - taken,
                                  [&](uint8_t* place, uint64_t most) {
                                    if (place != nullptr) std::memcpy(place, payload + taken, most);
                                    taken += most;
                                  });
    }
  });
  if (!isThere) {
    error_ = "a message is said to be in shared memory of which this rank was not told";
    return false;
  }
  endFrame();
  return true;
}

void FrameReader::endFrame() {
  count();
  const Delivery delivery = std::exchange(delivery_, {});
  delivery.message->end(frame_);
  if (delivery.inbox) delivery.inbox->noteFrame(frame_.key.source);
}

}  // namespace bagua::net
