// SPDX-License-Identifier: Apache-2.0
#include "backend/config.h"

#include <c10/util/env.h>

namespace bagua::config {

std::optional<std::string> hostId() {
  auto value = c10::utils::get_env("BAGUA_HOST_ID");
  if (!value || value->empty()) return std::nullopt;
  return value;
}

}  // namespace bagua::config
