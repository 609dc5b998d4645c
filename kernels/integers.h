// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/elements.h"

namespace bagua {

inline int64_t ceilDivide(int64_t value, int64_t by) { return value / by + (value % by != 0 ? 1 : 0); }

// The finaliser of SplitMix64: neighbouring numbers give unrelated ones.
BAGUA_HOST_DEVICE uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

// Of a part that begins at element `begin` of what `key` is for.
BAGUA_HOST_DEVICE uint64_t keyOfPart(uint64_t key, int64_t begin) {
  return mix64(key ^ mix64(static_cast<uint64_t>(begin)));
}

}  // namespace bagua
