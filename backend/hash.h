// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bagua {

// FNV-1a over words: the same on every rank, machine and build.
inline constexpr uint64_t kHashSeed = 14695981039346656037ULL;
inline uint64_t mix(uint64_t hash, uint64_t word) { return (hash ^ word) * 1099511628211ULL; }

}  // namespace bagua
