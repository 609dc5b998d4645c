// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/integers.h"

// What the block codecs draw at random: functions of a key, a group and an element, of nothing else. The same numbers
// come out on every device, for any cut of the work.
namespace bagua::block_scaled {

// Of a group of 128 elements.
struct Draw {
  // Bit i tells the sign of element i before a rotation.
  uint64_t signs[2];
  // Seeds of the numbers of elements, for stochastic rounding.
  uint32_t first;
  uint32_t second;

  BAGUA_HOST_DEVICE Draw(uint64_t key, int64_t group) {
    const uint64_t seed = mix64(key) + static_cast<uint64_t>(group) * 3U;
    signs[0] = mix64(seed);
    signs[1] = mix64(seed + 1U);
    const uint64_t other = mix64(seed + 2U);
    first = static_cast<uint32_t>(other);
    second = static_cast<uint32_t>(other >> 32U);
  }
};

// 32 random bits for an element of a group; UInt is uint32_t or a vector of them. The constants are those of Wellons'
// lowbias32.
template <class UInt>
BAGUA_HOST_DEVICE UInt bitsOfElement(const Draw& draw, UInt element) {
  UInt x = element * 0x9E3779B9U + draw.first;
  x ^= x >> 16U;
  x *= 0x7FEB352DU;
  x ^= (x >> 15U) ^ draw.second;
  x *= 0x846CA68BU;
  return x ^ (x >> 16U);
}

}  // namespace bagua::block_scaled
