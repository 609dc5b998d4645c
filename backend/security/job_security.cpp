// SPDX-License-Identifier: Apache-2.0
#include "backend/security/job_security.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <string.h>  // NOLINT(modernize-deprecated-headers): explicit_bzero

#include <utility>

#include "backend/os/own_folder.h"
#include "backend/security/openssl/openssl_security.h"

namespace bagua {
namespace {

constexpr const char* kLibrary = "libbagua_security.so";

MakeOpenSslSecurity* findMaker() {
  const auto path = ownFolder() / kLibrary;
  // Never closed.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* const why = library == nullptr ? dlerror() : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(library != nullptr,
                              "bagua: BAGUA_JOB_SECRET is set, but OpenSSL 3, which encrypts, cannot be used: ", why,
                              ". Install OpenSSL 3 (Debian and Ubuntu: libssl3), or, where bagua was built without its "
                              "headers, libssl-dev, and "
                              "bagua again");
  void* const maker = dlsym(library, kMakeOpenSslSecurity);
  TORCH_INTERNAL_ASSERT(maker != nullptr, path.string(), " is of another version of bagua");
  return reinterpret_cast<MakeOpenSslSecurity*>(maker);
}

std::shared_ptr<const JobSecurity> ofEnvironment() {
  auto secret = config::jobSecret();
  auto certificates = config::tlsFiles();
  if (!secret) {
    TORCH_CHECK_VALUE(!certificates, "bagua: BAGUA_TLS_CERTIFICATE needs BAGUA_JOB_SECRET (or BAGUA_JOB_SECRET_FILE) ",
                      "beside it: certificates protect connections, and the secret what ranks tell each other in the ",
                      "store");
    return nullptr;
  }
  return makeJobSecurity({.secret = std::move(*secret), .certificates = std::move(certificates)});
}

}  // namespace

std::shared_ptr<const JobSecurity> makeJobSecurity(JobSecuritySettings settings) {
  const std::unique_ptr<std::string, void (*)(std::string*)> wiped(
      &settings.secret, [](std::string* secret) { explicit_bzero(secret->data(), secret->size()); });
  static MakeOpenSslSecurity* const make = findMaker();
  return make(settings);
}

std::shared_ptr<const JobSecurity> jobSecurity() {
  // Never destroyed, as connections are not at the end of a process.
  static const auto* const security = new std::shared_ptr<const JobSecurity>(ofEnvironment());
  return *security;
}

void checkKeepsSecret(const char* what, const char* instead) {
  TORCH_CHECK_VALUE(!jobSecurity(), "bagua: BAGUA_JOB_SECRET is set, and ", what,
                    " would send data between hosts neither encrypted nor authenticated. ", instead,
                    ", or unset BAGUA_JOB_SECRET on all ranks");
}

}  // namespace bagua
