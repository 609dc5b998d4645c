// SPDX-License-Identifier: Apache-2.0
#include "backend/net/probe.h"

#include <c10/util/Exception.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>

namespace bagua::net {

void Probe::start(const SocketAddress& to, const Encryption* encryption, std::chrono::milliseconds patience) {
  int error = 0;
  if (isOver_) return;
  try {
    UnsharedFile socket = startConnecting(to, error);
    auto encrypted = encryption && error == 0 ? encryption->connect(socket.number()) : nullptr;
    stream_ = Stream(std::move(socket), std::move(encrypted));
    if (error != 0) return end(Result::kFiltered);
    loop_->add(stream_.number(), shared_from_this(), true);
  } catch (const c10::Error&) {
    // This process has no more files: that says nothing of the other one.
    return end(Result::kUnclear);
  }
  loop_->callLater(patience, [weak = weak_from_this()] {
    const auto probe = weak.lock();
    if (probe) probe->end(probe->isConnected_ ? Result::kUnclear : Result::kFiltered);
  });
}

void Probe::goOn() {
  if (isOver_) return;
  if (const auto result = step()) end(result);
}

std::optional<Probe::Result> Probe::step() {
  using Handshake = EncryptedStream::Handshake;
  if (!isConnected_ && errorOf(stream_.socket()) != 0) return Result::kFiltered;
  isConnected_ = true;
  if (!isProtected_) {
    const auto state = stream_.handshake();
    if (state != Handshake::kUnderWay && state != Handshake::kDone) return Result::kUnclear;
    isProtected_ = state == Handshake::kDone;
    loop_->askForWritable(stream_.number(), isProtected_ || stream_.hasUnsent());
    if (!isProtected_) return std::nullopt;
  }
  while (said_ < sizeof(hello_) || stream_.hasUnsent()) {
    auto* const begin = reinterpret_cast<char*>(const_cast<Hello*>(&hello_));
    std::array<iovec, 1> part{{{begin + said_, sizeof(hello_) - said_}}};
    const ssize_t size = stream_.send(part);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
    if (size < 0) return Result::kUnclear;
    said_ += static_cast<size_t>(size);
  }
  loop_->askForWritable(stream_.number(), false);
  while (heard_ < sizeof(answer_)) {
    const ssize_t size = stream_.receive(reinterpret_cast<char*>(&answer_) + heard_, sizeof(answer_) - heard_);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
    if (size <= 0) return Result::kUnclear;
    heard_ += static_cast<size_t>(size);
  }
  const bool isIt = isValid(answer_.frame) && answer_.frame.kind == Frame::Kind::kWelcome &&
                    answer_.hello.magic == Hello::kMagic && answer_.hello.from == hello_.to;
  return isIt ? Result::kAnswered : Result::kUnclear;
}

void Probe::end(std::optional<Result> result) {
  if (std::exchange(isOver_, true)) return;
  if (stream_.isOpen()) loop_->remove(stream_.number());
  stream_.close();
  if (result) tell_(*result);
}

void Probe::stop() {
  loop_->callLater(std::chrono::milliseconds(0), [probe = shared_from_this()] { probe->end(std::nullopt); });
}

}  // namespace bagua::net
