// SPDX-License-Identifier: Apache-2.0
#include "backend/security/openssl/keys.h"

#include <c10/util/Exception.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <limits>
#include <memory>

namespace bagua {
namespace {

constexpr uint8_t kFormat = 1;
constexpr size_t kNonceBytes = 12;
constexpr size_t kTagBytes = 16;
constexpr size_t kOverhead = 1 + kNonceBytes + kTagBytes;

// Says which protocol the keys are for; a new version of it gets new ones.
constexpr std::string_view kSalt = "bagua job secret 1";

Key hmac(const void* key, size_t keyBytes, std::span<const uint8_t> message) {
  Key result;
  unsigned int size = 0;
  const bool isDone = HMAC(EVP_sha256(), key, static_cast<int>(keyBytes), message.data(), message.size(), result.data(),
                           &size) != nullptr;
  TORCH_CHECK(isDone && size == Key::size(), "bagua: OpenSSL cannot compute HMAC-SHA256: ", lastOpenSslError());
  return result;
}

std::span<const uint8_t> bytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

int sizeOf(std::span<const uint8_t> bytes) {
  TORCH_CHECK(bytes.size() <= static_cast<size_t>(std::numeric_limits<int>::max()), "bagua: a value of ", bytes.size(),
              " bytes is too large for the store");
  return static_cast<int>(bytes.size());
}

using Cipher = std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)>;

}  // namespace

Key::~Key() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

Key extractKey(std::string_view secret) { return hmac(kSalt.data(), kSalt.size(), bytesOf(secret)); }

// One block of HKDF's output is all that a key takes.
Key deriveKey(const Key& extracted, std::string_view purpose) {
  std::vector<uint8_t> info(purpose.begin(), purpose.end());
  info.push_back(1);
  return hmac(extracted.data(), Key::size(), info);
}

Key authenticate(const Key& key, std::string_view label, std::span<const uint8_t> bytes) {
  std::vector<uint8_t> message(label.begin(), label.end());
  message.push_back(0);
  message.insert(message.end(), bytes.begin(), bytes.end());
  return hmac(key.data(), Key::size(), message);
}

bool isEqual(const Key& key, std::span<const uint8_t> bytes) {
  return bytes.size() == Key::size() && CRYPTO_memcmp(key.data(), bytes.data(), Key::size()) == 0;
}

std::vector<uint8_t> sealValue(const Key& key, std::string_view name, std::span<const uint8_t> value) {
  std::vector<uint8_t> sealed(value.size() + kOverhead);
  sealed[0] = kFormat;
  uint8_t* const nonce = sealed.data() + 1;
  uint8_t* const place = nonce + kNonceBytes;
  const Cipher cipher(EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free);
  int size = 0;
  int rest = 0;
  const auto associated = bytesOf(name);
  const bool isDone = cipher && RAND_bytes(nonce, kNonceBytes) == 1 &&
                      EVP_EncryptInit_ex(cipher.get(), EVP_aes_256_gcm(), nullptr, key.data(), nonce) == 1 &&
                      EVP_EncryptUpdate(cipher.get(), nullptr, &rest, associated.data(), sizeOf(associated)) == 1 &&
                      EVP_EncryptUpdate(cipher.get(), place, &size, value.data(), sizeOf(value)) == 1 &&
                      EVP_EncryptFinal_ex(cipher.get(), place + size, &rest) == 1 &&
                      EVP_CIPHER_CTX_ctrl(cipher.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, place + value.size()) == 1;
  TORCH_CHECK(isDone, "bagua: OpenSSL cannot encrypt with AES-256-GCM: ", lastOpenSslError());
  return sealed;
}

bool openValue(const Key& key, std::string_view name, std::span<const uint8_t> sealed, std::vector<uint8_t>& value) {
  if (sealed.size() < kOverhead || sealed[0] != kFormat) return false;
  const uint8_t* const nonce = sealed.data() + 1;
  const auto encrypted = sealed.subspan(1 + kNonceBytes, sealed.size() - kOverhead);
  std::array<uint8_t, kTagBytes> tag{};
  std::copy(sealed.end() - kTagBytes, sealed.end(), tag.begin());
  // One more: there has to be a place for nothing, too.
  value.resize(encrypted.size() + 1);
  const Cipher cipher(EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free);
  int size = 0;
  int rest = 0;
  const auto associated = bytesOf(name);
  const bool isAuthentic =
      cipher && EVP_DecryptInit_ex(cipher.get(), EVP_aes_256_gcm(), nullptr, key.data(), nonce) == 1 &&
      EVP_DecryptUpdate(cipher.get(), nullptr, &rest, associated.data(), sizeOf(associated)) == 1 &&
      EVP_DecryptUpdate(cipher.get(), value.data(), &size, encrypted.data(), sizeOf(encrypted)) == 1 &&
      EVP_CIPHER_CTX_ctrl(cipher.get(), EVP_CTRL_GCM_SET_TAG, kTagBytes, tag.data()) == 1 &&
      EVP_DecryptFinal_ex(cipher.get(), value.data() + size, &rest) == 1;
  value.resize(isAuthentic ? encrypted.size() : 0);
  // What it says of a forged value is nobody's later error.
  ERR_clear_error();
  return isAuthentic;
}

std::string lastOpenSslError() {
  const unsigned long code = ERR_peek_last_error();
  const char* const reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "no reason is given" : reason;
}

}  // namespace bagua
