// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace bagua {

// FNV-1a over words: the same on every rank, machine and build.
inline constexpr uint64_t kHashSeed = 14695981039346656037ULL;
inline uint64_t mix(uint64_t hash, uint64_t word) { return (hash ^ word) * 1099511628211ULL; }
// Of the bytes of a text.
inline uint64_t hashOf(std::string_view text) {
  uint64_t hash = kHashSeed;
  for (const unsigned char byte : text) hash = mix(hash, byte);
  return hash;
}

}  // namespace bagua
