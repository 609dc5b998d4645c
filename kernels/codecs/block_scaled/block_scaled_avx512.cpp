// SPDX-License-Identifier: Apache-2.0
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own intrinsics leave operands undefined on purpose and GCC 12 warns about it (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "kernels/codecs/block_scaled/block_scaled_halves.h"
#include "kernels/codecs/block_scaled/block_scaled_loops.h"

namespace bagua::block_scaled {
namespace {

struct Avx512 : HalvesOfF16C<Avx512> {
  static constexpr int kWidth = 16;
  using Types = Vectors<kWidth>;

  static BAGUA_GROUP Types::Floats lookUp(uint64_t table, Types::Ints index) {
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set1_epi64x(static_cast<int64_t>(table))));
    return _mm512_permutexvar_ps((__m512i)index, numbers);
  }

  static BAGUA_GROUP void storeLowestBytes(Types::Ints x, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
  }
  static BAGUA_GROUP Types::Ints loadBytes(const uint8_t* from) {
    return (Types::Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static BAGUA_GROUP Types::Ints larger(Types::Ints a, Types::Ints b) {
    return (Types::Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
  }
};

}  // namespace

const Loops& avx512Loops() {
  static constexpr Loops kLoops = loopsOf<Avx512>();
  return kLoops;
}

}  // namespace bagua::block_scaled
