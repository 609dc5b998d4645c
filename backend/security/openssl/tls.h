// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <optional>
#include <string>

#include "backend/config.h"
#include "backend/net/encryption.h"
#include "backend/security/openssl/keys.h"

namespace bagua {

// TLS 1.3 with AES-128-GCM between the processes of a job, each of which proves to the other that it knows the secret:
// - without certificates by a pre-shared key, with which a fresh X25519 exchange is authenticated: who learns the
// secret
//   later cannot read what was recorded;
// - with certificates, both sides' checked against the CA, by a keyed hash over what only the two ends of this
//   connection share (RFC 5705), which each sends first. A certificate alone lets nobody in.
// There are no tickets, no early data and no other suites.
class Tls final : public net::Encryption, public std::enable_shared_from_this<Tls> {
 public:
  struct Keys {
    // Names the secret in the first message, where it can be read.
    std::string fingerprint;
    // The pre-shared one, and that of the proofs.
    Key connection;
  };
  // Throws ValueError for certificates that cannot be used.
  Tls(Keys keys, const std::optional<config::TlsFiles>& certificates, uint64_t bytesPerKey);

  [[nodiscard]] std::unique_ptr<net::EncryptedStream> accept(int socket) const override;
  [[nodiscard]] std::unique_ptr<net::EncryptedStream> connect(int socket) const override;

 private:
  friend class TlsStream;

  void use(const config::TlsFiles& files);
  // As TLS wants a pre-shared key.
  [[nodiscard]] SSL_SESSION* newSession(SSL* ssl) const;
  static const Tls& of(SSL* ssl);
  static int offerKey(SSL* ssl, const EVP_MD* hash, const unsigned char** identity, size_t* identityBytes,
                      SSL_SESSION** session);
  static int findKey(SSL* ssl, const unsigned char* identity, size_t identityBytes, SSL_SESSION** session);

  const Keys keys_;
  const std::string identity_;
  const bool hasCertificates_;
  const uint64_t bytesPerKey_;
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
};

}  // namespace bagua
