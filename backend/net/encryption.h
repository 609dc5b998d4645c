// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace bagua::net {

// What lies between a connected socket and its bytes: proves to each side that the other belongs to the job, encrypts
// and authenticates. It does not own the socket. One thread reads while another writes; handshake() is over before.
class EncryptedStream {
 public:
  EncryptedStream() = default;
  virtual ~EncryptedStream() = default;
  EncryptedStream(const EncryptedStream&) = delete;
  EncryptedStream& operator=(const EncryptedStream&) = delete;

  enum class Handshake {
    kUnderWay,
    kDone,
    // The other side has ended the connection without a word: it may have had no time for it.
    kLost,
    // One side does not accept the other: see error().
    kFailed
  };
  // Goes on as far as it gets without waiting.
  virtual Handshake handshake() = 0;
  [[nodiscard]] virtual const std::string& error() const = 0;
  // The other side has shown that it knows the secret, though the handshake may not be over.
  [[nodiscard]] virtual bool isProven() const = 0;

  // As recv() with MSG_DONTWAIT. `mayAskSocket` false: only of what has been read from the socket already.
  virtual ssize_t receive(void* data, size_t size, bool mayAskSocket) = 0;
  // Whether receive() may have something though the socket has nothing.
  [[nodiscard]] virtual bool hasBuffered() const = 0;
  // As sendmsg() with MSG_DONTWAIT: how many bytes need not be kept any longer. Some of them may still be here,
  // encrypted: hasUnsent(). Another call brings them on their way, also one without bytes.
  virtual ssize_t send(std::span<const iovec> parts) = 0;
  [[nodiscard]] virtual bool hasUnsent() const = 0;
};

// How a process protects its connections.
class Encryption {
 public:
  Encryption() = default;
  virtual ~Encryption() = default;
  Encryption(const Encryption&) = delete;
  Encryption& operator=(const Encryption&) = delete;

  // Of a connection that another process, or this one, has opened.
  [[nodiscard]] virtual std::unique_ptr<EncryptedStream> accept(int socket) const = 0;
  [[nodiscard]] virtual std::unique_ptr<EncryptedStream> connect(int socket) const = 0;
};

}  // namespace bagua::net
