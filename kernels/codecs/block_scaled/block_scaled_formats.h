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

// Every element as a multiple of a power of two, from -127 to 127, in a byte.
struct EightBits {
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 2;
  static constexpr bool kIsRotated = false;

  template <class Machine, bool kIsStochastic>
  static BAGUA_GROUP Coded<Machine> code(typename Machine::Floats (&x)[Machine::kParts], const Draw& draw) {
    const float largest = Machine::largest(x);
    const Content content = contentOf(largest);
    if (content != Content::kNumbers) return withoutNumbers<Machine>(content == Content::kNan ? kNanScale : 0);
    if (largest > kLargest) clampToLargest<Machine>(x);
    Coded<Machine> coded;
    coded.scale = bfloat16OfFloat((largest < kLargest ? largest : kLargest) / 127.0F, true);
    const auto reciprocal = Machine::floats(1.0F / floatOfBFloat16(static_cast<uint32_t>(coded.scale)));
    for (int i = 0; i < Machine::kParts; ++i) {
      auto level = times(x[i], reciprocal);
      if constexpr (kIsStochastic) level = floorOf<Machine>(level + uniform<Machine>(draw, i));
      level = Machine::select(level > 127.0F, Machine::floats(127.0F), level);
      level = Machine::select(level < -127.0F, Machine::floats(-127.0F), level);
      coded.codes[i] = Machine::bits(level + kRounder) & 0xFF;
    }
    return coded;
  }

  BAGUA_HOST_DEVICE static bool isNan(uint64_t scale) { return (scale & 0x7F80U) == 0x7F80U; }

  template <class Machine>
  static BAGUA_GROUP void values(const Coded<Machine>& coded, const Draw& /*draw*/,
                                 typename Machine::Floats (&x)[Machine::kParts]) {
    const auto scale = Machine::floats(floatOfBFloat16(static_cast<uint32_t>(coded.scale)));
    for (int i = 0; i < Machine::kParts; ++i) {
      x[i] = times(Machine::toFloats((coded.codes[i] ^ 0x80) - 0x80), scale);
    }
  }

 private:
  template <class Machine>
  static BAGUA_GROUP Machine::Floats floorOf(typename Machine::Floats x) {
    const auto nearest = (x + kRounder) - kRounder;
    return nearest - Machine::select(nearest > x, Machine::floats(1.0F), Machine::floats(0.0F));
  }
};

// Four bits: sign and one of eight levels, which are closer to each other near zero, where most of the numbers are.
// Each block of 16 elements has a scale of six bits, a multiple of the group's unit: a magnitude of three bits of
// exponent and three of mantissa, as in a small floating point format.
struct FourBits {
  static constexpr int kBits = 4;
  static constexpr int kScaleBytes = 7;
  static constexpr bool kIsRotated = false;
  static constexpr int kBlock = 16;
  static constexpr int kBlocks = kGroup / kBlock;
  static constexpr float kTop = 22.0F;

  // A byte for each level, the lowest first: 0, 2, 4, 6, 9, 12, 16, 22.
  static constexpr uint64_t kLevels = 0x16100C0906040200U;
  // From a level to the next; none is above the last.
  static constexpr uint64_t kGaps = 0xFF06040303020202U;

  // The exponent of the largest scale, in the lowest byte; then six bits for each block, the first one lowest.
  static constexpr uint64_t kNan = 0xFF;
  // Scales of larger exponents are not made; they might decode to infinity times zero.
  static constexpr uint32_t kLargestExponent = 250;

  template <class Machine, bool kIsStochastic>
  static BAGUA_GROUP Coded<Machine> code(typename Machine::Floats (&x)[Machine::kParts], const Draw& draw) {
    float tops[Machine::kBlocks];
    Machine::largestOfBlocks(x, tops);
    float largest = Machine::largestOf(tops);
    const Content content = contentOf(largest);
    if (content != Content::kNumbers) return withoutNumbers<Machine>(content == Content::kNan ? kNan : 0);
    if (largest > kLargest) {
      clampToLargest<Machine>(x);
      for (float& top : tops) top = top > kLargest ? kLargest : top;
      largest = kLargest;
    }
    const uint32_t exponent = roundedToScale(times(largest, 1 / kTop), kIsStochastic) >> 3U;
    const float toUnits = powerOfTwo(263U - exponent);
    const float unit = powerOfTwo(exponent - 9U);
    uint32_t scales[Machine::kBlocks];
    float reciprocals[Machine::kBlocks];
    for (int i = 0; i < Machine::kBlocks; ++i) {
      scales[i] = scaleCode(times(times(tops[i], 1 / kTop), toUnits), kIsStochastic);
      reciprocals[i] = scales[i] == 0 ? 0.0F : 1.0F / times(unitsOf(scales[i]), unit);
    }
    Coded<Machine> coded;
    coded.scale = exponent | Machine::gatherScales(scales) << 8U;
    for (int i = 0; i < Machine::kParts; ++i) {
      const auto bits = Machine::bits(x[i]);
      const auto magnitude =
          times(Machine::asFloats(bits & 0x7FFFFFFF), Machine::floats(reciprocals[Machine::blockOf(i)]));
      const auto level = kIsStochastic ? randomLevel<Machine>(magnitude, draw, i) : nearestLevel<Machine>(magnitude);
      coded.codes[i] = level | ((bits >> 28) & 8);
    }
    return coded;
  }

  BAGUA_HOST_DEVICE static bool isNan(uint64_t scale) { return (scale & 0xFFU) > kLargestExponent; }

  template <class Machine>
  static BAGUA_GROUP void values(const Coded<Machine>& coded, const Draw& /*draw*/,
                                 typename Machine::Floats (&x)[Machine::kParts]) {
    const auto exponent = static_cast<uint32_t>(coded.scale & 0xFFU);
    // A group of zeros, or bytes that nobody made.
    const float unit = exponent < 10U ? 0.0F : powerOfTwo(exponent - 9U);
    uint32_t scales[Machine::kBlocks];
    Machine::scatterScales(coded.scale >> 8U, scales);
    float sizes[Machine::kBlocks];
    for (int i = 0; i < Machine::kBlocks; ++i) sizes[i] = times(unitsOf(scales[i]), unit);
    for (int i = 0; i < Machine::kParts; ++i) {
      const auto magnitude =
          times(Machine::lookUp(kLevels, coded.codes[i] & 7), Machine::floats(sizes[Machine::blockOf(i)]));
      x[i] = Machine::asFloats(Machine::bits(magnitude) | ((coded.codes[i] & 8) << 28)) + 0.0F;
    }
  }

 private:
  // The bits of a float with three of its mantissa, rounded half to even or up: exponent, then mantissa.
  BAGUA_HOST_DEVICE static uint32_t roundedToScale(float x, bool isRoundedUp) {
    const uint32_t bits = bitCast<uint32_t>(x);
    return (bits + (isRoundedUp ? 0xFFFFFU : 0x7FFFFU + ((bits >> 20U) & 1U))) >> 20U;
  }

  // From 0 to 63, of a scale in units: from 0 to 960.
  BAGUA_HOST_DEVICE static uint32_t scaleCode(float units, bool isRoundedUp) {
    if (units >= 8.0F) return roundedToScale(units, isRoundedUp) - 1032U;
    const float nearest = (units + kRounder) - kRounder;
    return static_cast<uint32_t>(nearest + (isRoundedUp && nearest < units ? 1.0F : 0.0F));
  }

  BAGUA_HOST_DEVICE static float unitsOf(uint32_t code) {
    const uint32_t units = code < 8U ? code : (8U + (code & 7U)) << ((code >> 3U) - 1U);
    return static_cast<float>(units);
  }

  template <class Machine>
  static BAGUA_GROUP Machine::Ints countAbove(typename Machine::Floats x, const float (&bounds)[7]) {
    const auto one = Machine::ints(1);
    const auto none = Machine::ints(0);
    auto count = none;
    for (const float bound : bounds) count += Machine::select(x >= bound, one, none);
    return count;
  }

  template <class Machine>
  static BAGUA_GROUP Machine::Ints nearestLevel(typename Machine::Floats magnitude) {
    return countAbove<Machine>(magnitude, {1.0F, 3.0F, 5.0F, 7.5F, 10.5F, 14.0F, 19.0F});
  }

  template <class Machine>
  static BAGUA_GROUP Machine::Ints randomLevel(typename Machine::Floats magnitude, const Draw& draw, int part) {
    const auto below = countAbove<Machine>(magnitude, {2.0F, 4.0F, 6.0F, 9.0F, 12.0F, 16.0F, 22.0F});
    const auto gap = times(Machine::lookUp(kGaps, below), uniform<Machine>(draw, part));
    const auto isUp = magnitude - Machine::lookUp(kLevels, below) > gap;
    const auto above = Machine::select(isUp, below + 1, below);
    return Machine::select(above > 7, Machine::ints(7), above);
  }
};

// What the formats of two bits and of one share. The group is multiplied with random signs and with the Hadamard matrix
// before it is coded, and again after: whatever its distribution was, the numbers between are nearly normal. The scale
// is a bfloat16 of what the numbers have to be multiplied with after the second time.
//
// 2^-16 keeps sums of 128 numbers finite, in both directions.
template <class Machine>
BAGUA_GROUP void rotate(typename Machine::Floats (&x)[Machine::kParts], const Draw& draw) {
  for (int i = 0; i < Machine::kParts; ++i) {
    x[i] = times(Machine::asFloats(Machine::bits(x[i]) ^ Machine::signsOf(draw, i)), Machine::floats(0x1p-16F));
  }
  Machine::hadamard(x);
}

// A number of the group is in `x` what it is in the values, times 2^-16.
template <class Machine>
BAGUA_GROUP void rotateBack(typename Machine::Floats (&x)[Machine::kParts], const Draw& draw) {
  constexpr float kMax = 0x1.FEp127F;
  Machine::hadamard(x);
  for (int i = 0; i < Machine::kParts; ++i) {
    x[i] = times(Machine::asFloats(Machine::bits(x[i]) ^ Machine::signsOf(draw, i)), Machine::floats(0x1p16F)) + 0.0F;
    x[i] = Machine::select(x[i] > kMax, Machine::floats(kMax), x[i]);
    x[i] = Machine::select(x[i] < -kMax, Machine::floats(-kMax), x[i]);
  }
}

// From the size of a level before the second rotation: its 128 for the first one, and 2^16.
BAGUA_HOST_DEVICE uint32_t rotatedScale(float level, bool isRoundedUp) {
  return bfloat16OfFloat(times(level, 0x1p9F), isRoundedUp);
}

BAGUA_HOST_DEVICE float levelOfScale(uint64_t scale) {
  return times(floatOfBFloat16(static_cast<uint32_t>(scale)), 0x1p-16F);
}

// What the formats of one and two bits have in common: a group is rotated, and then coded by the levels of the format.
template <class Format>
struct RotatedFormat {
  static constexpr int kScaleBytes = 2;
  static constexpr bool kIsRotated = true;

  template <class Machine, bool kIsStochastic>
  static BAGUA_GROUP Coded<Machine> code(typename Machine::Floats (&x)[Machine::kParts], const Draw& draw) {
    const float largest = Machine::largest(x);
    const Content content = contentOf(largest);
    if (content != Content::kNumbers) return withoutNumbers<Machine>(content == Content::kNan ? kNanScale : 0);
    if (largest > kLargest) clampToLargest<Machine>(x);
    rotate<Machine>(x, draw);
    if constexpr (kIsStochastic) return Format::template codeAtRandom<Machine>(x, draw);
    return Format::template codeNearest<Machine>(x);
  }

  BAGUA_HOST_DEVICE static bool isNan(uint64_t scale) { return EightBits::isNan(scale); }
};

// Two bits: a sign, and one of two levels.
struct TwoBits : RotatedFormat<TwoBits> {
  static constexpr int kBits = 2;
  // The larger level is the smaller one times kRatio. kBound divides them, in means of the magnitudes. Both are
  // those of least error for normal numbers, or nearly: exact in few bits.
  static constexpr float kRatio = 3.25F;
  static constexpr float kBound = 1.25F;

  template <class Machine>
  static BAGUA_GROUP void values(const Coded<Machine>& coded, const Draw& draw,
                                 typename Machine::Floats (&x)[Machine::kParts]) {
    const auto small = Machine::floats(levelOfScale(coded.scale));
    const auto large = Machine::floats(times(levelOfScale(coded.scale), kRatio));
    for (int i = 0; i < Machine::kParts; ++i) {
      const auto level = Machine::select((coded.codes[i] & 2) != 0, large, small);
      x[i] = Machine::asFloats(Machine::bits(level) ^ ((coded.codes[i] & 1) << 31));
    }
    rotateBack<Machine>(x, draw);
  }

 private:
  friend RotatedFormat<TwoBits>;

  // The scale is that of least error for the codes.
  template <class Machine>
  static BAGUA_GROUP Coded<Machine> codeNearest(const typename Machine::Floats (&x)[Machine::kParts]) {
    Coded<Machine> coded;
    typename Machine::Floats terms[Machine::kParts];
    for (int i = 0; i < Machine::kParts; ++i) terms[i] = Machine::asFloats(Machine::bits(x[i]) & 0x7FFFFFFF);
    const float sum = Machine::sum(terms);
    const float bound = times(sum, kBound / kGroup);
    typename Machine::Floats counts[Machine::kParts];
    for (int i = 0; i < Machine::kParts; ++i) {
      const auto bits = Machine::bits(x[i]);
      const auto magnitude = Machine::asFloats(bits & 0x7FFFFFFF);
      const auto isLarge = magnitude > bound;
      counts[i] = Machine::select(isLarge, Machine::floats(1.0F), Machine::floats(0.0F));
      terms[i] = Machine::select(isLarge, times(magnitude, Machine::floats(kRatio)), magnitude);
      coded.codes[i] = Machine::select(isLarge, Machine::ints(2), Machine::ints(0)) | ((bits >> 31) & 1);
    }
    // Squares of levels: exact, as the levels have few bits.
    const float squares = kGroup + times(Machine::sum(counts), kRatio * kRatio - 1);
    coded.scale = rotatedScale(Machine::sum(terms) / squares, false);
    return coded;
  }

  // The larger level is the largest number, so that every number lies between two levels.
  template <class Machine>
  static BAGUA_GROUP Coded<Machine> codeAtRandom(const typename Machine::Floats (&x)[Machine::kParts],
                                                 const Draw& draw) {
    Coded<Machine> coded;
    coded.scale = rotatedScale(Machine::largest(x) / kRatio, true);
    const auto reciprocal = Machine::floats(1.0F / times(floatOfBFloat16(static_cast<uint32_t>(coded.scale)), 0x1p-9F));
    for (int i = 0; i < Machine::kParts; ++i) {
      const auto chance = uniform<Machine>(draw, i);
      const auto level = times(x[i], reciprocal);
      const auto magnitude = Machine::asFloats(Machine::bits(level) & 0x7FFFFFFF);
      const auto isLarge = magnitude - 1.0F > times(chance, Machine::floats(kRatio - 1));
      const auto isOutside = magnitude >= 1.0F;
      const auto isNegative = level + 1.0F <= chance + chance;
      const auto sign = Machine::select(isOutside, (Machine::bits(level) >> 31) & 1,
                                        Machine::select(isNegative, Machine::ints(1), Machine::ints(0)));
      coded.codes[i] = Machine::select(isLarge, Machine::ints(2), Machine::ints(0)) | sign;
    }
    return coded;
  }
};

// One bit: the sign.
struct OneBit : RotatedFormat<OneBit> {
  static constexpr int kBits = 1;

  template <class Machine>
  static BAGUA_GROUP void values(const Coded<Machine>& coded, const Draw& draw,
                                 typename Machine::Floats (&x)[Machine::kParts]) {
    const auto level = Machine::bits(Machine::floats(levelOfScale(coded.scale)));
    for (int i = 0; i < Machine::kParts; ++i) x[i] = Machine::asFloats(level ^ (coded.codes[i] << 31));
    rotateBack<Machine>(x, draw);
  }

 private:
  friend RotatedFormat<OneBit>;

  template <class Machine>
  static BAGUA_GROUP Coded<Machine> codeNearest(const typename Machine::Floats (&x)[Machine::kParts]) {
    Coded<Machine> coded;
    typename Machine::Floats magnitudes[Machine::kParts];
    for (int i = 0; i < Machine::kParts; ++i) {
      magnitudes[i] = Machine::asFloats(Machine::bits(x[i]) & 0x7FFFFFFF);
      coded.codes[i] = (Machine::bits(x[i]) >> 31) & 1;
    }
    // The level of least error is the mean of the magnitudes.
    coded.scale = rotatedScale(times(Machine::sum(magnitudes), 1.0F / kGroup), false);
    return coded;
  }

  template <class Machine>
  static BAGUA_GROUP Coded<Machine> codeAtRandom(const typename Machine::Floats (&x)[Machine::kParts],
                                                 const Draw& draw) {
    Coded<Machine> coded;
    coded.scale = rotatedScale(Machine::largest(x), true);
    const auto reciprocal = Machine::floats(1.0F / times(floatOfBFloat16(static_cast<uint32_t>(coded.scale)), 0x1p-9F));
    for (int i = 0; i < Machine::kParts; ++i) {
      const auto chance = uniform<Machine>(draw, i);
      const auto isNegative = times(x[i], reciprocal) + 1.0F <= chance + chance;
      coded.codes[i] = Machine::select(isNegative, Machine::ints(1), Machine::ints(0));
    }
    return coded;
  }
};

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
