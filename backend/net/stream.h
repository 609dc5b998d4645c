// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>

#include "backend/net/encryption.h"
#include "backend/net/socket.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void* address, unsigned long size);  // NOLINT: the sanitizer's own name and types
#endif

namespace bagua::net {

// ThreadSanitizer notes what a call has sent after the call, when the peer's answer may have been written over it. So
// its own note is off (intercept_send=0 in CMakePresets.json), and this one is made before.
inline void noteRead([[maybe_unused]] std::span<const iovec> parts) {
#if defined(__SANITIZE_THREAD__)
  for (const auto& part : parts) __tsan_read_range(part.iov_base, part.iov_len);
#endif
}

// A socket and what protects it. Where nothing does, every call is the system's. See EncryptedStream.
class Stream {
 public:
  Stream() = default;
  explicit Stream(UnsharedFile socket, std::unique_ptr<EncryptedStream> encrypted = nullptr)
      : socket_(std::move(socket)), encrypted_(std::move(encrypted)) {}

  [[nodiscard]] int number() const { return socket_.number(); }
  [[nodiscard]] const UnsharedFile& socket() const { return socket_; }
  [[nodiscard]] bool isOpen() const { return socket_.isOpen(); }
  void close() { *this = Stream(); }

  EncryptedStream::Handshake handshake() {
    return encrypted_ ? encrypted_->handshake() : EncryptedStream::Handshake::kDone;
  }
  [[nodiscard]] std::string error() const { return encrypted_ ? encrypted_->error() : ""; }

  ssize_t receive(void* data, size_t size, bool mayAskSocket = true) {
    if (encrypted_) return encrypted_->receive(data, size, mayAskSocket);
    return recv(number(), data, size, MSG_DONTWAIT);
  }
  [[nodiscard]] bool hasBuffered() const { return encrypted_ && encrypted_->hasBuffered(); }
  ssize_t send(std::span<iovec> parts) {
    if (encrypted_) return encrypted_->send(parts);
    noteRead(parts);
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    return sendmsg(number(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  [[nodiscard]] bool hasUnsent() const { return encrypted_ && encrypted_->hasUnsent(); }

 private:
  UnsharedFile socket_;
  std::unique_ptr<EncryptedStream> encrypted_;
};

}  // namespace bagua::net
