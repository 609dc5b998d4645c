// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/codecs/block_scaled/format.h"

namespace bagua::block_scaled {

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

}  // namespace bagua::block_scaled
