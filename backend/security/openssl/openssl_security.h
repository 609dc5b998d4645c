// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "backend/security/job_security.h"

namespace bagua {

// What libbagua_security.so has for libbagua: a function of this type and name. Throws ValueError.
using MakeOpenSslSecurity = std::shared_ptr<const JobSecurity>(const JobSecuritySettings& settings);
inline constexpr const char* kMakeOpenSslSecurity = "bagua_make_openssl_security";

}  // namespace bagua
