// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <openssl/ssl.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/net/encryption.h"
#include "backend/security/openssl/tls.h"

namespace bagua {

// One connection. OpenSSL works on memory: what comes is read from the socket in large pieces, and what goes is
// collected for one call of the system. A mutex guards all of it, held for one record or one piece at a time.
class TlsStream final : public net::EncryptedStream {
 public:
  TlsStream(std::shared_ptr<const Tls> tls, int socket, bool isServer);

  Handshake handshake() override;
  [[nodiscard]] const std::string& error() const override { return error_; }
  ssize_t receive(void* data, size_t size, bool mayAskSocket) override;
  [[nodiscard]] bool hasBuffered() const override { return hasBuffered_; }
  ssize_t send(std::span<const iovec> parts) override;
  [[nodiscard]] bool hasUnsent() const override { return unsent_ > 0; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  // What is exchanged after a handshake with certificates.
  enum class Stage { kHandshake, kSayProof, kHearProof, kDone };

  // For OpenSSL.
  static const BIO_METHOD* socketMethod();
  static TlsStream& of(BIO* bio);
  static int readBio(BIO* bio, char* data, int size);
  static int writeBio(BIO* bio, const char* data, int size);
  static long controlBio(BIO* bio, int command, long number, void* pointer);

  // Under the mutex.
  Handshake goOn();
  Handshake hearProof();
  bool hasBrokenOff();
  [[nodiscard]] Key proofOf(bool isServer);
  Handshake fail(const std::string& why);
  // Below 0 with errno.
  ssize_t readRecord(void* data, size_t size, bool mayAskSocket);
  // The next record of what lies from byte `from` of `parts` on: its bytes, or 0.
  size_t encryptRecord(std::span<const iovec> parts, size_t from);
  bool encrypt(const void* data, size_t size);
  ssize_t flush();

  const std::shared_ptr<const Tls> tls_;
  const int socket_;
  const bool isServer_;
  std::mutex mutex_;
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;

  Stage stage_ = Stage::kHandshake;
  std::string error_;
  std::atomic<bool> isProven_ = false;
  std::array<uint8_t, Key::size()> heard_{};
  size_t heardBytes_ = 0;

  // Read from the socket, encrypted.
  std::vector<uint8_t> incoming_;
  size_t used_ = 0;
  size_t filled_ = 0;
  bool mayAskSocket_ = true;
  bool hasEnded_ = false;
  int socketError_ = 0;
  std::atomic<bool> hasBuffered_ = false;

  // For the socket, encrypted.
  std::vector<uint8_t> outgoing_;
  size_t sent_ = 0;
  std::atomic<size_t> unsent_ = 0;
  uint64_t encryptedWithKey_ = 0;
};

}  // namespace bagua
