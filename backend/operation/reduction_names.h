// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace bagua {

// How torch writes the c10d::ReduceOp::RedOpType `op`. Any number will do: a peer may have sent it.
inline const char* reductionName(int64_t op) {
  constexpr std::array kNames = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return 0 <= op && op < static_cast<int64_t>(kNames.size()) ? kNames[op] : "UNUSED";
}

}  // namespace bagua
