// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bagua {

// 32 bytes that are overwritten when they go.
class Key {
 public:
  Key() = default;
  Key(const Key& other) = default;
  Key& operator=(const Key&) = delete;
  ~Key();

  [[nodiscard]] const uint8_t* data() const { return bytes_.data(); }
  [[nodiscard]] uint8_t* data() { return bytes_.data(); }
  [[nodiscard]] static constexpr size_t size() { return 32; }

 private:
  std::array<uint8_t, 32> bytes_{};
};

// HKDF (RFC 5869) with SHA-256: the key that is extracted from a secret, and keys for one purpose each, whose knowledge
// tells nothing of each other or of the secret.
Key extractKey(std::string_view secret);
Key deriveKey(const Key& extracted, std::string_view purpose);

// HMAC-SHA256.
Key authenticate(const Key& key, std::string_view label, std::span<const uint8_t> bytes);
// In a time that does not tell where they differ.
bool isEqual(const Key& key, std::span<const uint8_t> bytes);

// AES-256-GCM under a random nonce: format, nonce, encrypted value, tag. `name` is authenticated with it.
std::vector<uint8_t> sealValue(const Key& key, std::string_view name, std::span<const uint8_t> value);
// False for what was not sealed with this key under this name.
bool openValue(const Key& key, std::string_view name, std::span<const uint8_t> sealed, std::vector<uint8_t>& value);

// What OpenSSL says went wrong last on this thread.
std::string lastOpenSslError();

}  // namespace bagua
