// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/codecs/block_scaled/block_scaled_random.h"
#include "kernels/elements.h"

// The formats of the block codecs, each written once for all processors. A format codes a group of 128 float32 numbers
// by itself: a scale, and 1, 2, 4 or 8 bits for each number. kernels/README.md describes the bytes. Zeros decode to
// positive ones, which is what the additions of 0 are for.
//
// `Machine` is what a group is held in: registers of a CPU (block_scaled_vectors.h), or a number of a warp's threads
// (block_scaled_cuda.cu). A thread of it holds kParts values of type Floats or Ints, each of kWidth elements of the
// group; with operators of both, and with the operations across elements that a format needs. All arithmetic is
// float32, rounded after every operation, so the bytes are the same everywhere.
namespace bagua::block_scaled {

#if defined(__CUDACC__)
#define BAGUA_GROUP __device__ __forceinline__
#else
#define BAGUA_GROUP inline __attribute__((always_inline))
#endif

inline constexpr int kGroup = 128;
// Larger numbers are coded as this one: what scales are rounded up to is still finite.
inline constexpr float kLargest = 0x1.8p127F;
// Groups without a larger number decode to zeros: scales of smaller ones would be denormal, or their reciprocals
// infinite.
inline constexpr float kSmallest = 0x1p-80F;
inline constexpr uint32_t kInfinityBits = 0x7F800000;
inline constexpr uint32_t kSignBit = 0x80000000;
// Adding it rounds a small float to an integer, half to even, in its last bits.
inline constexpr float kRounder = 0x1.8p23F;
// The scale of a group that decodes to NaN, where it is a bfloat16.
inline constexpr uint32_t kNanScale = 0x7FC0;

BAGUA_HOST_DEVICE bool isNanScale(uint64_t scale) { return (scale & 0x7F80U) == 0x7F80U; }

// The product, never fused with an addition.
template <class T>
BAGUA_HOST_DEVICE T times(T a, T b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// 2^(exponent - 127), for exponents from 1 to 254.
BAGUA_HOST_DEVICE float powerOfTwo(uint32_t exponent) { return bitCast<float>(exponent << 23U); }

BAGUA_HOST_DEVICE float floatOfBFloat16(uint32_t bits) { return bitCast<float>(bits << 16U); }

// Of a float that is not negative.
BAGUA_HOST_DEVICE uint32_t bfloat16OfFloat(float x, bool isRoundedUp) {
  const uint32_t bits = bitCast<uint32_t>(x);
  return (bits + (isRoundedUp ? 0xFFFFU : 0x7FFFU + ((bits >> 16U) & 1U))) >> 16U;
}

// A group as it travels.
template <class Machine>
struct Coded {
  uint64_t scale;
  Machine::Ints codes[Machine::kParts];
};

// What all formats share: the group's largest magnitude decides whether there is anything to code.
enum class Content { kNumbers, kZeros, kNan };

BAGUA_HOST_DEVICE Content contentOf(float largest) {
  if ((bitCast<uint32_t>(largest) & kInfinityBits) == kInfinityBits) return Content::kNan;
  return largest < kSmallest ? Content::kZeros : Content::kNumbers;
}

template <class Machine>
BAGUA_GROUP Coded<Machine> withoutNumbers(uint64_t scale) {
  Coded<Machine> coded;
  coded.scale = scale;
  for (int i = 0; i < Machine::kParts; ++i) coded.codes[i] = Machine::ints(0);
  return coded;
}

template <class Machine>
BAGUA_GROUP void clampToLargest(typename Machine::Floats (&x)[Machine::kParts]) {
  for (int i = 0; i < Machine::kParts; ++i) {
    x[i] = Machine::select(x[i] > kLargest, Machine::floats(kLargest), x[i]);
    x[i] = Machine::select(x[i] < -kLargest, Machine::floats(-kLargest), x[i]);
  }
}

// A number from 0 to 1 for each element of a part, without 1.
template <class Machine>
BAGUA_GROUP Machine::Floats uniform(const Draw& draw, int part) {
  const auto bits = bitsOfElement(draw, Machine::elements(part));
  return times(Machine::toFloats(Machine::toInts(bits >> 8U)), Machine::floats(0x1p-24F));
}

template <class Format>
inline constexpr int kBytesOfGroup = Format::kScaleBytes + kGroup* Format::kBits / 8;

// The codes of a byte are a part of the group apart: byte j holds elements j, j + n, j + 2 n ..., where n is the number
// of bytes, the first one in the lowest bits. So vectors are packed without a change of order.
template <class Format, class Machine>
BAGUA_GROUP void writeGroup(const Coded<Machine>& coded, uint8_t* bytes) {
  Machine::storeScale(coded.scale, Format::kScaleBytes, bytes);
  Machine::template storeCodes<Format::kBits>(coded.codes, bytes + Format::kScaleBytes);
}

template <class Format, class Machine>
BAGUA_GROUP Coded<Machine> readGroup(const uint8_t* bytes) {
  Coded<Machine> coded;
  coded.scale = Machine::loadScale(bytes, Format::kScaleBytes);
  Machine::template loadCodes<Format::kBits>(bytes + Format::kScaleBytes, coded.codes);
  return coded;
}

}  // namespace bagua::block_scaled
