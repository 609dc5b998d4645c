// SPDX-License-Identifier: Apache-2.0
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own intrinsics leave operands undefined on purpose and GCC 12 warns about it (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels/codecs/minmax_uint8/minmax_uint8_simd.h"

namespace bagua::minmax_uint8::cpu {
namespace {

struct Doubles {
  __m512d first;
  __m512d second;
};

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  using Type = __m512;
};
template <>
struct VecOf<double> {
  using Type = Doubles;
};

struct Avx512 {
  static constexpr int64_t kWidth = 16;
  template <class T>
  using Vec = VecOf<T>::Type;
  template <class T>
  using Flag = __mmask16;
  using Floats = __m512;
  using Ints = __m512i;

  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

  template <class T>
  static Vec<T> broadcast(T x) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return _mm512_set1_ps(x);
    } else {
      return {_mm512_set1_pd(x), _mm512_set1_pd(x)};
    }
  }

  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats roundHalfToEven(Floats x) { return _mm512_roundscale_ps(x, kNearest); }
  static Ints toInt(Floats x) { return _mm512_cvttps_epi32(x); }

  static Doubles add(Doubles a, Doubles b) {
    return {_mm512_add_pd(a.first, b.first), _mm512_add_pd(a.second, b.second)};
  }
  static Doubles sub(Doubles a, Doubles b) {
    return {_mm512_sub_pd(a.first, b.first), _mm512_sub_pd(a.second, b.second)};
  }
  static Doubles mul(Doubles a, Doubles b) {
    return {_mm512_mul_pd(a.first, b.first), _mm512_mul_pd(a.second, b.second)};
  }
  static Doubles div(Doubles a, Doubles b) {
    return {_mm512_div_pd(a.first, b.first), _mm512_div_pd(a.second, b.second)};
  }
  static Doubles min(Doubles a, Doubles b) {
    return {_mm512_min_pd(a.first, b.first), _mm512_min_pd(a.second, b.second)};
  }
  static Doubles max(Doubles a, Doubles b) {
    return {_mm512_max_pd(a.first, b.first), _mm512_max_pd(a.second, b.second)};
  }
  static Doubles roundHalfToEven(Doubles x) {
    return {_mm512_roundscale_pd(x.first, kNearest), _mm512_roundscale_pd(x.second, kNearest)};
  }
  static Ints toInt(Doubles x) {
    const Ints first = _mm512_castsi256_si512(_mm512_cvttpd_epi32(x.first));
    return _mm512_inserti64x4(first, _mm512_cvttpd_epi32(x.second), 1);
  }

  static __mmask16 unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static __mmask16 unordered(Doubles a, Doubles b) {
    return _mm512_kor(_mm512_cmp_pd_mask(a.first, b.first, _CMP_UNORD_Q),
                      _mm512_cmp_pd_mask(a.second, b.second, _CMP_UNORD_Q));
  }
  static __mmask16 either(__mmask16 a, __mmask16 b) { return _mm512_kor(a, b); }
  static bool any(__mmask16 flag) { return flag != 0; }

  static __m256i toHalf(Floats x) { return _mm512_cvtps_ph(x, kNearest); }
  static __m256i toBFloat16(Floats x) {
    const Ints bits = _mm512_castps_si512(x);
    const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Ints rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(rounded, unordered(x, x), 0x7FC0));
  }
  static Floats fromBFloat16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static __m256i load16(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }

  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static Doubles load(const double* x) { return {_mm512_loadu_pd(x), _mm512_loadu_pd(x + 8)}; }
  static Floats load(const HalfBits* x) { return _mm512_cvtph_ps(load16(x)); }
  static Floats load(const BFloat16Bits* x) { return fromBFloat16(load16(x)); }

  static void store(float* x, Floats v) { _mm512_storeu_ps(x, v); }
  static void store(double* x, Doubles v) {
    _mm512_storeu_pd(x, v.first);
    _mm512_storeu_pd(x + 8, v.second);
  }
  static void store(HalfBits* x, Floats v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), toHalf(v)); }
  static void store(BFloat16Bits* x, Floats v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), toBFloat16(v)); }

  static void stream(float* x, Floats v) { _mm512_stream_ps(x, v); }
  static void stream(double* x, Doubles v) {
    _mm512_stream_pd(x, v.first);
    _mm512_stream_pd(x + 8, v.second);
  }
  static void stream(HalfBits* x, Floats v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(x), toHalf(v)); }
  static void stream(BFloat16Bits* x, Floats v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(x), toBFloat16(v)); }
  static void fence() { _mm_sfence(); }

  // Residuals, as numbers of T. A double that no float can hold becomes the largest.
  template <class T>
  static Vec<T> loadFloats(const float* x) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return load(x);
    } else {
      return {_mm512_cvtps_pd(_mm256_loadu_ps(x)), _mm512_cvtps_pd(_mm256_loadu_ps(x + 8))};
    }
  }
  static void storeFloats(float* x, Floats v) { store(x, v); }
  static void storeFloats(float* x, Doubles v) {
    constexpr double kMax = ElementTraits<float>::kMaxFinite;
    const Doubles bounded = max(min(v, broadcast(kMax)), broadcast(-kMax));
    _mm256_storeu_ps(x, _mm512_cvtpd_ps(bounded.first));
    _mm256_storeu_ps(x + 8, _mm512_cvtpd_ps(bounded.second));
  }

  // The value as an element would hold it; the pointer only names the element's type.
  static Floats rounded(Floats v, const float* /*type*/) { return v; }
  static Doubles rounded(Doubles v, const double* /*type*/) { return v; }
  static Floats rounded(Floats v, const HalfBits* /*type*/) { return _mm512_cvtph_ps(toHalf(v)); }
  static Floats rounded(Floats v, const BFloat16Bits* /*type*/) { return fromBFloat16(toBFloat16(v)); }

  template <class T>
  static Vec<T> loadCodes(const uint8_t* codes) {
    const Ints ints = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    if constexpr (sizeof(T) == sizeof(float)) {
      return _mm512_cvtepi32_ps(ints);
    } else {
      return {_mm512_cvtepi32_pd(_mm512_castsi512_si256(ints)), _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(ints, 1))};
    }
  }

  // Saturates to 0 and 255. Packing works within each 128 bits; the permutation restores the order.
  static Ints pack(Ints a, Ints b, Ints c, Ints d) {
    const Ints bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, bytes);
  }
  static void storeCodes(uint8_t* codes, Ints bytes) { _mm512_storeu_si512(codes, bytes); }
  static void streamCodes(uint8_t* codes, Ints bytes) { _mm512_stream_si512(reinterpret_cast<Ints*>(codes), bytes); }
};

}  // namespace

const Loops& avx512Loops() {
  static constexpr Loops kLoops = vectorLoops<Avx512>("avx512");
  return kLoops;
}

}  // namespace bagua::minmax_uint8::cpu
