// SPDX-License-Identifier: Apache-2.0
#include "backend/security/openssl/openssl_security.h"

#include <openssl/crypto.h>

#include <array>
#include <cstdio>

#include "backend/security/openssl/keys.h"
#include "backend/security/openssl/tls.h"

namespace bagua {
namespace {

std::string fingerprintOf(const Key& extracted) {
  const Key key = deriveKey(extracted, "fingerprint");
  std::array<char, 17> text{};
  for (size_t byte = 0; byte < 8; ++byte) std::snprintf(text.data() + 2 * byte, 3, "%02x", key.data()[byte]);
  return text.data();
}

class OpenSslSecurity final : public JobSecurity {
 public:
  OpenSslSecurity(const Key& extracted, const JobSecuritySettings& settings)
      : fingerprint_(fingerprintOf(extracted)),
        storeKey_(deriveKey(extracted, "store")),
        tls_(std::make_shared<const Tls>(Tls::Keys{fingerprint_, deriveKey(extracted, "connections")},
                                         settings.certificates, settings.bytesPerKey)) {}

  [[nodiscard]] const std::string& fingerprint() const override { return fingerprint_; }
  [[nodiscard]] std::vector<uint8_t> seal(const std::string& name, const std::vector<uint8_t>& value) const override {
    return sealValue(storeKey_, name, value);
  }
  [[nodiscard]] std::optional<std::vector<uint8_t>> open(const std::string& name,
                                                         const std::vector<uint8_t>& sealed) const override {
    std::vector<uint8_t> value;
    if (!openValue(storeKey_, name, sealed, value)) return std::nullopt;
    return value;
  }
  [[nodiscard]] std::shared_ptr<const net::Encryption> encryption() const override { return tls_; }

 private:
  const std::string fingerprint_;
  const Key storeKey_;
  const std::shared_ptr<const Tls> tls_;
};

}  // namespace
}  // namespace bagua

extern "C" {
// NOLINTNEXTLINE(readability-identifier-naming): as kMakeOpenSslSecurity says.
bagua::MakeOpenSslSecurity bagua_make_openssl_security;
std::shared_ptr<const bagua::JobSecurity> bagua_make_openssl_security(const bagua::JobSecuritySettings& settings) {
  // Threads may still be reading from connections when the process ends: OpenSSL is not to free what they use. Whoever
  // was the first to use OpenSSL in this process has decided that already, see Transport::halt().
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  return std::make_shared<bagua::OpenSslSecurity>(bagua::extractKey(settings.secret), settings);
}
}
