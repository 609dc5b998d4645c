// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

// Every environment variable that bagua reads. The README lists them.
namespace bagua::config {

// BAGUA_HOST_ID: ranks with different values count as being on different hosts (as NCCL_HOSTID does for NCCL).
std::optional<std::string> hostId();

}  // namespace bagua::config
