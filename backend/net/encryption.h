// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace bagua::net {

// This layer between a connected socket and its bytes proves to each side that the other belongs to the job, encrypts
// and authenticates. It does not own the socket. One thread may read while another writes; handshake() is over before.
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
  // Goes on as far as it gets without waiting for the peer.
  virtual Handshake handshake() = 0;
  [[nodiscard]] virtual const std::string& error() const = 0;

  // Works as recv() with MSG_DONTWAIT. Without `mayAskSocket` it gives only what has been read from the socket already.
  virtual ssize_t receive(void* data, size_t size, bool mayAskSocket) = 0;
  // Returns whether receive() may have something though the socket has nothing.
  [[nodiscard]] virtual bool hasBuffered() const = 0;
  // Works as sendmsg() with MSG_DONTWAIT. The caller may overwrite the bytes that it returns the number of; some of
  // them may still be here, encrypted: hasUnsent(). Another call brings them on their way, also one without bytes.
  virtual ssize_t send(std::span<const iovec> parts) = 0;
  [[nodiscard]] virtual bool hasUnsent() const = 0;
};

// A process protects its connections by this.
class Encryption {
 public:
  Encryption() = default;
  virtual ~Encryption() = default;
  Encryption(const Encryption&) = delete;
  Encryption& operator=(const Encryption&) = delete;

  // Makes the layer of a connection that another process, or this one, has opened.
  [[nodiscard]] virtual std::unique_ptr<EncryptedStream> accept(int socket) const = 0;
  [[nodiscard]] virtual std::unique_ptr<EncryptedStream> connect(int socket) const = 0;
};

}  // namespace bagua::net
