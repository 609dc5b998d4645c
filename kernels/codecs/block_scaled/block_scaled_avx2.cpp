// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "kernels/codecs/block_scaled/block_scaled_halves.h"
#include "kernels/codecs/block_scaled/block_scaled_loops.h"

namespace bagua::block_scaled {
namespace {

struct Avx2 : HalvesOfF16C<Avx2> {
  static constexpr int kWidth = 8;
  using Types = Vectors<kWidth>;

  static BAGUA_GROUP Types::Floats lookUp(uint64_t table, Types::Ints index) {
    const __m256 numbers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(table))));
    return _mm256_permutevar8x32_ps(numbers, (__m256i)index);
  }

  static BAGUA_GROUP void storeLowestBytes(Types::Ints x, uint8_t* to) {
    const __m256i lowest = _mm256_shuffle_epi8(
        (__m256i)x, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                     0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), both);
  }
  // Stores those of four vectors, one after the other. The bytes above the lowest have to be zero.
  static BAGUA_GROUP void storeLowestBytesOfFour(const Types::Ints* x, uint8_t* to) {
    const __m256i first = _mm256_packus_epi32((__m256i)x[0], (__m256i)x[1]);
    const __m256i second = _mm256_packus_epi32((__m256i)x[2], (__m256i)x[3]);
    // Packing leaves the halves of the registers apart.
    const __m256i halves = _mm256_packus_epi16(first, second);
    const __m256i bytes = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
  }
  static BAGUA_GROUP Types::Ints loadBytes(const uint8_t* from) {
    return (Types::Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }

  static BAGUA_GROUP Types::Ints larger(Types::Ints a, Types::Ints b) {
    return (Types::Ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
  }
};

}  // namespace

const Loops& avx2Loops() {
  static constexpr Loops kLoops = loopsOf<Avx2>();
  return kLoops;
}

}  // namespace bagua::block_scaled
