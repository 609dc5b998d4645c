// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <string>

#include "backend/nccl_net/nccl_net_api.h"

namespace bagua::nccl_net {

// NCCL's log, from the first init() on.
inline std::atomic<Logger> ncclLog = nullptr;

inline void tell(LogLevel level, unsigned long parts, const std::string& text) {
  if (const Logger log = ncclLog) log(level, parts, "nccl_net", 0, "NET/bagua : %s", text.c_str());
}
inline void warn(const std::string& text) { tell(LogLevel::kWarn, kLogNet, text); }

}  // namespace bagua::nccl_net
