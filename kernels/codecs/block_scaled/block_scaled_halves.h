// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/elements.h"

// Half floats with F16C, eight at a time. The instructions keep a NaN's bits; ours have none but the quiet bit.
namespace bagua::block_scaled {

template <class Isa>
struct HalvesOfF16C {
  static inline __attribute__((always_inline)) void loadHalves(const HalfBits* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) loadHalves(from + i, to + i);
    if (i == count) return;
    HalfBits rest[8] = {};
    float restOfFloats[8];
    memcpy(rest, from + i, static_cast<size_t>(count - i) * sizeof(HalfBits));
    loadHalves(rest, restOfFloats);
    memcpy(to + i, restOfFloats, static_cast<size_t>(count - i) * sizeof(float));
  }

  static inline __attribute__((always_inline)) void storeHalves(const float* from, int64_t count, HalfBits* to) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) storeHalves(from + i, to + i);
    if (i == count) return;
    float rest[8] = {};
    HalfBits restOfHalves[8];
    memcpy(rest, from + i, static_cast<size_t>(count - i) * sizeof(float));
    storeHalves(rest, restOfHalves);
    memcpy(to + i, restOfHalves, static_cast<size_t>(count - i) * sizeof(HalfBits));
  }

 private:
  static inline __attribute__((always_inline)) void loadHalves(const HalfBits* from, float* to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }

  static inline __attribute__((always_inline)) void storeHalves(const float* from, HalfBits* to) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(_mm256_loadu_ps(from), kNearest));
  }
};

}  // namespace bagua::block_scaled
