// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "kernels/codecs/minmax_uint8/minmax_uint8_simd.h"

namespace bagua::minmax_uint8::cpu {
namespace {

struct Doubles {
  __m256d first;
  __m256d second;
};

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  using Type = __m256;
};
template <>
struct VecOf<double> {
  using Type = Doubles;
};

struct Avx2 {
  static constexpr int64_t kWidth = 8;
  template <class T>
  using Vec = VecOf<T>::Type;
  template <class T>
  using Flag = Vec<T>;
  using Floats = __m256;
  using Ints = __m256i;

  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

  template <class T>
  static Vec<T> broadcast(T x) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return _mm256_set1_ps(x);
    } else {
      return {_mm256_set1_pd(x), _mm256_set1_pd(x)};
    }
  }

  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static Floats roundHalfToEven(Floats x) { return _mm256_round_ps(x, kNearest); }
  static Ints toInt(Floats x) { return _mm256_cvttps_epi32(x); }

  static Doubles add(Doubles a, Doubles b) {
    return {_mm256_add_pd(a.first, b.first), _mm256_add_pd(a.second, b.second)};
  }
  static Doubles sub(Doubles a, Doubles b) {
    return {_mm256_sub_pd(a.first, b.first), _mm256_sub_pd(a.second, b.second)};
  }
  static Doubles mul(Doubles a, Doubles b) {
    return {_mm256_mul_pd(a.first, b.first), _mm256_mul_pd(a.second, b.second)};
  }
  static Doubles div(Doubles a, Doubles b) {
    return {_mm256_div_pd(a.first, b.first), _mm256_div_pd(a.second, b.second)};
  }
  static Doubles min(Doubles a, Doubles b) {
    return {_mm256_min_pd(a.first, b.first), _mm256_min_pd(a.second, b.second)};
  }
  static Doubles max(Doubles a, Doubles b) {
    return {_mm256_max_pd(a.first, b.first), _mm256_max_pd(a.second, b.second)};
  }
  static Doubles roundHalfToEven(Doubles x) {
    return {_mm256_round_pd(x.first, kNearest), _mm256_round_pd(x.second, kNearest)};
  }
  static Ints toInt(Doubles x) { return _mm256_set_m128i(_mm256_cvttpd_epi32(x.second), _mm256_cvttpd_epi32(x.first)); }

  static Floats unordered(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
  static Doubles unordered(Doubles a, Doubles b) {
    return {_mm256_cmp_pd(a.first, b.first, _CMP_UNORD_Q), _mm256_cmp_pd(a.second, b.second, _CMP_UNORD_Q)};
  }
  static Floats either(Floats a, Floats b) { return _mm256_or_ps(a, b); }
  static Doubles either(Doubles a, Doubles b) {
    return {_mm256_or_pd(a.first, b.first), _mm256_or_pd(a.second, b.second)};
  }
  static bool any(Floats flag) { return _mm256_movemask_ps(flag) != 0; }
  static bool any(Doubles flag) { return _mm256_movemask_pd(_mm256_or_pd(flag.first, flag.second)) != 0; }

  static __m128i toHalf(Floats x) { return _mm256_cvtps_ph(x, kNearest); }
  static __m128i toBFloat16(Floats x) {
    const Ints bits = _mm256_castps_si256(x);
    const Ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const Ints rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const Ints nan = _mm256_castps_si256(unordered(x, x));
    const Ints words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  static Floats fromBFloat16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static __m128i load16(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }

  static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  static Doubles load(const double* x) { return {_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)}; }
  static Floats load(const HalfBits* x) { return _mm256_cvtph_ps(load16(x)); }
  static Floats load(const BFloat16Bits* x) { return fromBFloat16(load16(x)); }

  static void store(float* x, Floats v) { _mm256_storeu_ps(x, v); }
  static void store(double* x, Doubles v) {
    _mm256_storeu_pd(x, v.first);
    _mm256_storeu_pd(x + 4, v.second);
  }
  static void store(HalfBits* x, Floats v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(x), toHalf(v)); }
  static void store(BFloat16Bits* x, Floats v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(x), toBFloat16(v)); }

  static void stream(float* x, Floats v) { _mm256_stream_ps(x, v); }
  static void stream(double* x, Doubles v) {
    _mm256_stream_pd(x, v.first);
    _mm256_stream_pd(x + 4, v.second);
  }
  static void stream(HalfBits* x, Floats v) { _mm_stream_si128(reinterpret_cast<__m128i*>(x), toHalf(v)); }
  static void stream(BFloat16Bits* x, Floats v) { _mm_stream_si128(reinterpret_cast<__m128i*>(x), toBFloat16(v)); }
  static void fence() { _mm_sfence(); }

  // Residuals, as numbers of T. A double that no float can hold becomes the largest.
  template <class T>
  static Vec<T> loadFloats(const float* x) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return load(x);
    } else {
      return {_mm256_cvtps_pd(_mm_loadu_ps(x)), _mm256_cvtps_pd(_mm_loadu_ps(x + 4))};
    }
  }
  static void storeFloats(float* x, Floats v) { store(x, v); }
  static void storeFloats(float* x, Doubles v) {
    constexpr double kMax = ElementTraits<float>::kMaxFinite;
    const Doubles bounded = max(min(v, broadcast(kMax)), broadcast(-kMax));
    _mm_storeu_ps(x, _mm256_cvtpd_ps(bounded.first));
    _mm_storeu_ps(x + 4, _mm256_cvtpd_ps(bounded.second));
  }

  // The value as an element would hold it; the pointer only names the element's type.
  static Floats rounded(Floats v, const float* /*type*/) { return v; }
  static Doubles rounded(Doubles v, const double* /*type*/) { return v; }
  static Floats rounded(Floats v, const HalfBits* /*type*/) { return _mm256_cvtph_ps(toHalf(v)); }
  static Floats rounded(Floats v, const BFloat16Bits* /*type*/) { return fromBFloat16(toBFloat16(v)); }

  template <class T>
  static Vec<T> loadCodes(const uint8_t* codes) {
    const Ints ints = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    if constexpr (sizeof(T) == sizeof(float)) {
      return _mm256_cvtepi32_ps(ints);
    } else {
      return {_mm256_cvtepi32_pd(_mm256_castsi256_si128(ints)), _mm256_cvtepi32_pd(_mm256_extracti128_si256(ints, 1))};
    }
  }

  // Saturates to 0 and 255. Packing works within each 128 bits; the permutation restores the order.
  static Ints pack(Ints a, Ints b, Ints c, Ints d) {
    const Ints bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static void storeCodes(uint8_t* codes, Ints bytes) { _mm256_storeu_si256(reinterpret_cast<Ints*>(codes), bytes); }
  static void streamCodes(uint8_t* codes, Ints bytes) { _mm256_stream_si256(reinterpret_cast<Ints*>(codes), bytes); }
};

}  // namespace

const Loops& avx2Loops() {
  static constexpr Loops kLoops = vectorLoops<Avx2>("avx2");
  return kLoops;
}

}  // namespace bagua::minmax_uint8::cpu
