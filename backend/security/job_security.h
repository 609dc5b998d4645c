// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/config.h"
#include "backend/net/encryption.h"

namespace bagua {

// What the ranks of a job with a secret in common do with it. Any thread may call.
class JobSecurity {
 public:
  JobSecurity() = default;
  virtual ~JobSecurity() = default;
  JobSecurity(const JobSecurity&) = delete;
  JobSecurity& operator=(const JobSecurity&) = delete;

  // Tells secrets apart, and nothing else of them: 16 hexadecimal digits.
  [[nodiscard]] virtual const std::string& fingerprint() const = 0;
  // Encrypts and authenticates a value together with its name, which is not in it.
  [[nodiscard]] virtual std::vector<uint8_t> seal(const std::string& name, const std::vector<uint8_t>& value) const = 0;
  // What was sealed with the same secret and name; nothing for anything else.
  [[nodiscard]] virtual std::optional<std::vector<uint8_t>> open(const std::string& name,
                                                                 const std::vector<uint8_t>& sealed) const = 0;
  // Of connections between processes.
  [[nodiscard]] virtual std::shared_ptr<const net::Encryption> encryption() const = 0;
};

struct JobSecuritySettings {
  std::string secret;
  std::optional<config::TlsFiles> certificates = std::nullopt;
  // Encrypted with one key in one direction. AES-GCM is good for about 2^24.5 records of 16 KiB.
  uint64_t bytesPerKey = uint64_t{64} << 30U;
};

// Takes the settings, and overwrites the secret. The work is OpenSSL's, in a library of its own beside this one, which
// is loaded here and not before: without a secret nothing needs OpenSSL. Throws NotImplementedError where it cannot be
// loaded, ValueError for settings that are none.
std::shared_ptr<const JobSecurity> makeJobSecurity(JobSecuritySettings settings);

// Of this process, as its environment says; read once. Null: the job has no secret. Throws ValueError, or
// NotImplementedError as above.
std::shared_ptr<const JobSecurity> jobSecurity();

// Throws ValueError, which names `what` and `instead`, where the job has a secret that `what` would not keep.
void checkKeepsSecret(const char* what, const char* instead);

}  // namespace bagua
