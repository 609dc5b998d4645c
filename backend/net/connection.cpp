// SPDX-License-Identifier: Apache-2.0
#include "backend/net/connection.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "backend/net/greeting.h"
#include "backend/net/link.h"

namespace bagua::net {
namespace {

// Hands a connection's frames to its link.
class LinkSink final : public FrameSink {
 public:
  LinkSink(Link& link, Connection& connection) : link_(link), connection_(connection) {}

  Delivery begin(const Frame& frame, const std::vector<uint8_t>& context) override {
    return link_.begin(frame, context);
  }
  bool control(const Frame& frame, const std::vector<uint8_t>& context) override {
    return link_.control(connection_, frame, context);
  }
  bool acknowledge(uint64_t received) override { return link_.acknowledge(connection_, received); }
  bool readCell(uint32_t cell, const std::function<void(const uint8_t* payload)>& read) override {
    return link_.readCell(cell, read);
  }

 private:
  Link& link_;
  Connection& connection_;
};

}  // namespace

Connection::Connection(std::weak_ptr<Link> link, Stream stream, uint64_t number, bool isOwn,
                       std::vector<uint8_t> greeting)
    : isConnecting(isOwn),
      isAnswered(!isOwn),
      isWelcome(!isOwn),
      isBlocked(isOwn),
      link_(std::move(link)),
      stream_(std::move(stream)),
      number_(number),
      isOwn_(isOwn),
      head_(std::move(greeting)) {}

void Connection::onReadable() {
  const auto link = link_.lock();
  if (!link || isClosed) return;
  // The reason why it cannot connect counts as readable too.
  if (isConnecting) return link->onConnecting(shared_from_this());
  try {
    LinkSink sink(*link, *this);
    link->onRead(shared_from_this(), reader_.read(stream_, sink));
  } catch (const std::exception& error) {
    // The frame has not done what it was to do, and the other side will not send it again.
    link->close(error.what());
  }
}

void Connection::onWritable() {
  const auto link = link_.lock();
  if (!link || isClosed) return;
  if (isConnecting) return link->onConnecting(shared_from_this());
  link->onWritable(*this);
  // The socket does not tell again of what came with the end of the handshake or with the hello.
  if (stream_.hasBuffered()) onReadable();
}

void Connection::give(OutgoingFrame frame, std::shared_ptr<PayloadMemory> memory) {
  // In this order: what comes in between is told once more.
  toldWeight_ = reader_.weight();
  toldFrames_ = frame.header.received = reader_.frames();
  isToTell = false;
  if (isCounted(frame.header)) sent_.give();
  head_ = bytesOf(frame.header);
  head_.insert(head_.end(), frame.context.begin(), frame.context.end());
  headWritten_ = 0;
  payload_ = frame.payload();
  payloadLeft_ = frame.isInCell ? 0 : frame.header.payloadBytes;
  cell_ = frame.isInCell ? 0 : frame.header.cell;
  memory_ = cell_ > 0 ? std::move(memory) : nullptr;
  frame_ = std::move(frame);
}

int Connection::write() {
  if (const uint32_t number = std::exchange(cell_, 0); number > 0) {
    memory_->fill(number - 1, payload_, payloadLeft_);
    payload_ += std::exchange(payloadLeft_, 0);
  }
  while (hasToWrite()) {
    std::array<iovec, 2> parts{
        {{head_.data() + headWritten_, head_.size() - headWritten_}, {const_cast<uint8_t*>(payload_), payloadLeft_}}};
    const ssize_t size = stream_.send(parts);
    if (size < 0) return errno;
    const size_t ofHead = std::min(static_cast<size_t>(size), head_.size() - headWritten_);
    headWritten_ += ofHead;
    payload_ += static_cast<size_t>(size) - ofHead;
    payloadLeft_ -= static_cast<size_t>(size) - ofHead;
  }
  return 0;
}

std::optional<OutgoingFrame> Connection::takeWritten() {
  if (hasToWrite()) return std::nullopt;
  return takeUnwritten();
}

std::optional<OutgoingFrame> Connection::takeUnwritten() {
  head_.clear();
  headWritten_ = 0;
  payloadLeft_ = 0;
  memory_.reset();
  auto frame = std::exchange(frame_, std::nullopt);
  if (frame && frame->header.cell > 0) {
    frame->isInCell = true;
    frame->reader = {};
  }
  return frame;
}

void Connection::copyPayloads(const Outgoing& message, uint64_t end) {
  sent_.copyPayloads(message, end);
  // A thread may be writing any other frame, and one that is copied already.
  if (!carries(message, end)) return;
  // The writer copies a payload into its cell before anything of the frame leaves.
  if (frame_->header.cell > 0) {
    frame_->reader = {};
    return;
  }
  frame_->copyPayload();
  payload_ = frame_->payload() + (frame_->header.payloadBytes - payloadLeft_);
}

}  // namespace bagua::net
