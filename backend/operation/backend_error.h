// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace bagua {

// A c10::DistBackendError to be kept or raised elsewhere: what whoever waits for an operation gets.
inline std::exception_ptr makeBackendError(const std::string& message) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
}

}  // namespace bagua
