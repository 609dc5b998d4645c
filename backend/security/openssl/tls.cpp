// SPDX-License-Identifier: Apache-2.0
#include "backend/security/openssl/tls.h"

#include <c10/util/Exception.h>
#include <openssl/err.h>

#include <cstring>
#include <string_view>
#include <utility>

#include "backend/security/openssl/tls_stream.h"

namespace bagua {
namespace {

constexpr const char* kSuite = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteId[] = {0x13, 0x01};
// OpenSSL wants a name where sessions and certificates may meet.
constexpr unsigned char kSessions[] = {'b', 'a', 'g', 'u', 'a'};

// A key file with a password is not to ask the terminal for it.
int noPassword(char* /*buffer*/, int /*size*/, int /*isWriting*/, void* /*data*/) { return -1; }

}  // namespace

Tls::Tls(Keys keys, const std::optional<config::TlsFiles>& certificates, uint64_t bytesPerKey)
    : keys_(std::move(keys)),
      identity_("bagua " + keys_.fingerprint),
      hasCertificates_(certificates.has_value()),
      bytesPerKey_(bytesPerKey),
      context_(SSL_CTX_new(TLS_method()), &SSL_CTX_free) {
  SSL_CTX* const context = context_.get();
  const bool isMade = context != nullptr && SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                      SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) == 1 &&
                      SSL_CTX_set_ciphersuites(context, kSuite) == 1 &&
                      SSL_CTX_set1_groups_list(context, "X25519") == 1 && SSL_CTX_set_num_tickets(context, 0) == 1;
  TORCH_CHECK(isMade, "bagua: OpenSSL cannot do TLS 1.3 with ", kSuite, " and X25519: ", lastOpenSslError());
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  // Without certificates of our own this refuses all that a peer might offer in place of the key.
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_session_id_context(context, kSessions, sizeof(kSessions));
  // Whoever can cut a connection can do so with or without a last word; what was cut off is missed in any case.
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_app_data(context, this);
  if (certificates) {
    use(*certificates);
  } else {
    SSL_CTX_set_psk_use_session_callback(context, &Tls::offerKey);
    SSL_CTX_set_psk_find_session_callback(context, &Tls::findKey);
  }
}

void Tls::use(const config::TlsFiles& files) {
  SSL_CTX* const context = context_.get();
  const auto check = [](bool isUsable, const char* variable, const std::string& file) {
    TORCH_CHECK_VALUE(isUsable, "bagua: ", variable, " is to name a file in PEM format that can be used, got '", file,
                      "': ", lastOpenSslError());
  };
  ERR_clear_error();
  SSL_CTX_set_default_passwd_cb(context, &noPassword);
  check(SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) == 1, "BAGUA_TLS_CERTIFICATE",
        files.certificate);
  check(SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) == 1 &&
            SSL_CTX_check_private_key(context) == 1,
        "BAGUA_TLS_KEY", files.key);
  check(SSL_CTX_load_verify_locations(context, files.authority.c_str(), nullptr) == 1, "BAGUA_TLS_CA", files.authority);
}

const Tls& Tls::of(SSL* ssl) { return *static_cast<const Tls*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl))); }

SSL_SESSION* Tls::newSession(SSL* ssl) const {
  std::unique_ptr<SSL_SESSION, decltype(&SSL_SESSION_free)> session(SSL_SESSION_new(), &SSL_SESSION_free);
  const SSL_CIPHER* const suite = SSL_CIPHER_find(ssl, kSuiteId);
  const bool isMade = session && suite != nullptr &&
                      SSL_SESSION_set1_master_key(session.get(), keys_.connection.data(), Key::size()) == 1 &&
                      SSL_SESSION_set_cipher(session.get(), suite) == 1 &&
                      SSL_SESSION_set_protocol_version(session.get(), TLS1_3_VERSION) == 1 &&
                      SSL_SESSION_set1_id_context(session.get(), kSessions, sizeof(kSessions)) == 1;
  return isMade ? session.release() : nullptr;
}

int Tls::offerKey(SSL* ssl, const EVP_MD* hash, const unsigned char** identity, size_t* identityBytes,
                  SSL_SESSION** session) {
  // A second time, for another hash: there is none.
  *session = nullptr;
  if (hash != nullptr && !EVP_MD_is_a(hash, "SHA256")) return 1;
  const Tls& tls = of(ssl);
  *session = tls.newSession(ssl);
  *identity = reinterpret_cast<const unsigned char*>(tls.identity_.data());
  *identityBytes = tls.identity_.size();
  return *session != nullptr ? 1 : 0;
}

int Tls::findKey(SSL* ssl, const unsigned char* identity, size_t identityBytes, SSL_SESSION** session) {
  const Tls& tls = of(ssl);
  *session = nullptr;
  // Without a key and without a certificate there is nothing to go on with.
  if (std::string_view(reinterpret_cast<const char*>(identity), identityBytes) != tls.identity_) return 1;
  *session = tls.newSession(ssl);
  return *session != nullptr ? 1 : 0;
}

std::unique_ptr<net::EncryptedStream> Tls::accept(int socket) const {
  return std::make_unique<TlsStream>(shared_from_this(), socket, true);
}

std::unique_ptr<net::EncryptedStream> Tls::connect(int socket) const {
  return std::make_unique<TlsStream>(shared_from_this(), socket, false);
}

}  // namespace bagua
