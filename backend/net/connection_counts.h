// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace bagua::net {

// Connections of this process that have broken, and whose links went on over others. Any thread may count.
std::atomic<uint64_t>& reconnections();

}  // namespace bagua::net
