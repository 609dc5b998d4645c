// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "backend/net/encryption.h"

namespace bagua::net {

// Decides what passes on its way out of a process. Any thread may call.
class Gate {
 public:
  // Only so many bytes more pass; then a socket takes no more.
  void limit(uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_ = bytes;
  }
  // Only so many calls more pass; whoever makes another one is kept in it.
  void hold(int calls) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_ = calls;
    changed_.notify_all();
  }
  void open() {
    limit(std::numeric_limits<uint64_t>::max());
    hold(std::numeric_limits<int>::max());
  }
  // Waits until a thread is kept in a call for the `count`-th time.
  void waitForKept(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return kept_ >= count; });
  }

  // Returns how many of `bytes` may pass.
  uint64_t pass(uint64_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (calls_ == 0) {
      ++kept_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return calls_ > 0; });
    }
    --calls_;
    return std::min(bytes, left_);
  }
  void notePassed(uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_ -= bytes;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t left_ = std::numeric_limits<uint64_t>::max();
  int calls_ = std::numeric_limits<int>::max();
  int kept_ = 0;
};

// Encrypts nothing: what leaves over it passes a gate.
class HeldStreams final : public Encryption {
 public:
  explicit HeldStreams(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}

  [[nodiscard]] std::unique_ptr<EncryptedStream> accept(int socket) const override { return connect(socket); }
  [[nodiscard]] std::unique_ptr<EncryptedStream> connect(int socket) const override {
    return std::make_unique<Held>(socket, gate_);
  }

 private:
  class Held final : public EncryptedStream {
   public:
    Held(int socket, std::shared_ptr<Gate> gate) : socket_(socket), gate_(std::move(gate)) {}

    Handshake handshake() override { return Handshake::kDone; }
    [[nodiscard]] const std::string& error() const override { return error_; }
    ssize_t receive(void* data, size_t size, bool /*mayAskSocket*/) override {
      return recv(socket_, data, size, MSG_DONTWAIT);
    }
    [[nodiscard]] bool hasBuffered() const override { return false; }
    ssize_t send(std::span<const iovec> parts) override {
      size_t all = 0;
      for (const auto& part : parts) all += part.iov_len;
      uint64_t left = gate_->pass(all);
      ssize_t sent = 0;
      for (const auto& part : parts) {
        const size_t size = std::min<uint64_t>(part.iov_len, left);
        if (size == 0) continue;
        const ssize_t more = ::send(socket_, part.iov_base, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (more < 0 && sent == 0) return more;
        sent += std::max<ssize_t>(more, 0);
        left -= size;
        if (more < static_cast<ssize_t>(size)) break;
      }
      gate_->notePassed(static_cast<uint64_t>(sent));
      if (sent > 0 || all == 0) return sent;
      errno = EAGAIN;
      return -1;
    }
    [[nodiscard]] bool hasUnsent() const override { return false; }

   private:
    const int socket_;
    const std::shared_ptr<Gate> gate_;
    const std::string error_;
  };

  const std::shared_ptr<Gate> gate_;
};

}  // namespace bagua::net
