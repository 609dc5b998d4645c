// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/codecs/block_scaled/format.h"

namespace bagua::block_scaled {

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

  BAGUA_HOST_DEVICE static bool isNan(uint64_t scale) { return isNanScale(scale); }
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

}  // namespace bagua::block_scaled
