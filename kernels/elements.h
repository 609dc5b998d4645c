// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
// Forced inlining also keeps code that a translation unit compiled for AVX-512 out of the other ones.
#define BAGUA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define BAGUA_HOST_DEVICE inline __attribute__((always_inline))
#endif

// The element types of codecs. Half and bfloat16 are kept as bits, so that the vector code needs no header of torch.
namespace bagua {

struct HalfBits {
  uint16_t bits;
};

struct BFloat16Bits {
  uint16_t bits;
};

template <class To, class From>
BAGUA_HOST_DEVICE To bitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Compute: the type in which values of Element are compared, scaled and added.
template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<float> {
  using Compute = float;
  static constexpr float kMaxFinite = std::numeric_limits<float>::max();
  static BAGUA_HOST_DEVICE float load(float x) { return x; }
  static BAGUA_HOST_DEVICE float store(float x) { return x; }
  static BAGUA_HOST_DEVICE float nan() { return bitCast<float>(uint32_t{0x7FC00000}); }
};

template <>
struct ElementTraits<double> {
  using Compute = double;
  static constexpr double kMaxFinite = std::numeric_limits<double>::max();
  static BAGUA_HOST_DEVICE double load(double x) { return x; }
  static BAGUA_HOST_DEVICE double store(double x) { return x; }
  static BAGUA_HOST_DEVICE double nan() { return bitCast<double>(uint64_t{0x7FF8000000000000}); }
};

template <>
struct ElementTraits<HalfBits> {
  using Compute = float;
  static constexpr float kMaxFinite = 65504.0F;

  static BAGUA_HOST_DEVICE float load(HalfBits x) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(x.bits));
#else
    const uint32_t bits = x.bits;
    const uint32_t sign = (bits & 0x8000U) << 16U;
    const uint32_t exponent = (bits >> 10U) & 0x1FU;
    const uint32_t mantissa = bits & 0x3FFU;
    if (exponent == 0) {  // Zero or denormal: a multiple of 2^-24.
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
      return sign != 0 ? -magnitude : magnitude;
    }
    const uint32_t wideExponent = exponent == 31 ? 255 : exponent + 112;
    return bitCast<float>(sign | (wideExponent << 23U) | (mantissa << 13U));
#endif
  }

  static BAGUA_HOST_DEVICE HalfBits store(float x) {
#if defined(__CUDA_ARCH__)
    return {__half_as_ushort(__float2half_rn(x))};
#else
    const uint32_t all = bitCast<uint32_t>(x);
    const auto sign = static_cast<uint16_t>((all >> 16U) & 0x8000U);
    const uint32_t magnitude = all & 0x7FFFFFFFU;
    uint32_t half = 0;
    if (magnitude > 0x7F800000U) {
      half = 0x7E00;
    } else if (magnitude >= 0x477FF000U) {  // 65520 and more round to infinity.
      half = 0x7C00;
    } else if (magnitude < 0x38800000U) {  // Below 2^-14 half counts in steps of 2^-24.
      half = static_cast<uint32_t>(__builtin_rintf(bitCast<float>(magnitude) * 0x1p24F));
    } else {
      half = (magnitude + 0xFFFU + ((magnitude >> 13U) & 1U) - 0x38000000U) >> 13U;
    }
    return {static_cast<uint16_t>(sign | half)};
#endif
  }

  static BAGUA_HOST_DEVICE HalfBits nan() { return {0x7E00}; }
};

template <>
struct ElementTraits<BFloat16Bits> {
  using Compute = float;
  static constexpr float kMaxFinite = 0x1.FEp127F;

  static BAGUA_HOST_DEVICE float load(BFloat16Bits x) { return bitCast<float>(static_cast<uint32_t>(x.bits) << 16U); }

  static BAGUA_HOST_DEVICE BFloat16Bits store(float x) {
    const uint32_t all = bitCast<uint32_t>(x);
    if ((all & 0x7FFFFFFFU) > 0x7F800000U) return nan();
    return {static_cast<uint16_t>((all + 0x7FFFU + ((all >> 16U) & 1U)) >> 16U)};
  }

  static BAGUA_HOST_DEVICE BFloat16Bits nan() { return {0x7FC0}; }
};

}  // namespace bagua
