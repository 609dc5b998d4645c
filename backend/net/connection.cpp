// SPDX-License-Identifier: Apache-2.0
#include "backend/net/connection.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace bagua::net {
namespace {

template <class Object>
std::vector<uint8_t> asBytes(const Object& object) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(&object);
  return {begin, begin + sizeof(object)};
}

}  // namespace

Connection::Connection(std::weak_ptr<Owner> owner, Stream stream)
    : owner_(std::move(owner)), stream_(std::move(stream)) {}

Connection::Connection(std::weak_ptr<Owner> owner, Stream stream, const Hello& hello)
    : isConnecting(true),
      isBlocked(true),
      owner_(std::move(owner)),
      stream_(std::move(stream)),
      head_(asBytes(hello)) {}

void Connection::onReadable() {
  const auto owner = owner_.lock();
  if (!owner) return;
  // The reason why it cannot connect counts as readable too.
  if (isConnecting) return owner->onConnecting(shared_from_this());
  owner->onRead(shared_from_this(), reader_.read(stream_, *owner));
}

void Connection::onWritable() {
  const auto owner = owner_.lock();
  if (!owner) return;
  if (isConnecting) return owner->onConnecting(shared_from_this());
  owner->onWritable(*this);
  // The socket does not tell again of what came with the end of the handshake or with the hello.
  if (stream_.hasBuffered()) onReadable();
}

void Connection::give(OutgoingFrame frame, std::shared_ptr<PayloadMemory> memory) {
  head_ = asBytes(frame.header);
  head_.insert(head_.end(), frame.context.begin(), frame.context.end());
  headWritten_ = 0;
  payload_ = frame.payload();
  payloadLeft_ = frame.header.payloadBytes;
  cell_ = frame.header.cell;
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
  head_.clear();
  headWritten_ = 0;
  copied_.clear();
  memory_.reset();
  return std::exchange(frame_, std::nullopt);
}

void Connection::copyPayload() {
  copied_.assign(payload_, payload_ + payloadLeft_);
  payload_ = copied_.data();
}

}  // namespace bagua::net
