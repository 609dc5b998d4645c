// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/codecs/block_scaled/format.h"

namespace bagua::block_scaled {

// Every element as a multiple of the group's scale, from -127 to 127, in a byte. The scale is a bfloat16.
struct EightBits {
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 2;
  static constexpr bool kIsRotated = false;

  // A group's largest number decides these. Their two divisions take as long as all else, and can be made before.
  struct Scale {
    float largest;
    uint32_t bits;
    float reciprocal;
  };

  template <class Machine>
  static BAGUA_GROUP Scale scaleOf(const typename Machine::Floats (&x)[Machine::kParts]) {
    const float largest = Machine::largest(x);
    const uint32_t bits = bfloat16OfFloat((largest < kLargest ? largest : kLargest) / 127.0F, true);
    return {.largest = largest, .bits = bits, .reciprocal = 1.0F / floatOfBFloat16(bits)};
  }

  template <class Machine, bool kIsStochastic>
  static BAGUA_GROUP Coded<Machine> code(typename Machine::Floats (&x)[Machine::kParts], const Draw& draw) {
    return code<Machine, kIsStochastic>(x, scaleOf<Machine>(x), draw);
  }

  template <class Machine, bool kIsStochastic>
  static BAGUA_GROUP Coded<Machine> code(typename Machine::Floats (&x)[Machine::kParts], const Scale& scale,
                                         const Draw& draw) {
    // A way of its own for ordinary numbers, on which they stay in registers.
    if (scale.largest >= kSmallest && scale.largest <= kLargest) [[likely]] {
      return multiples<Machine, kIsStochastic>(x, scale, draw);
    }
    const Content content = contentOf(scale.largest);
    if (content != Content::kNumbers) return withoutNumbers<Machine>(content == Content::kNan ? kNanScale : 0);
    clampToLargest<Machine>(x);
    return multiples<Machine, kIsStochastic>(x, scale, draw);
  }

  BAGUA_HOST_DEVICE static bool isNan(uint64_t scale) { return isNanScale(scale); }

  template <class Machine>
  static BAGUA_GROUP void values(const Coded<Machine>& coded, const Draw& /*draw*/,
                                 typename Machine::Floats (&x)[Machine::kParts]) {
    const auto scale = Machine::floats(floatOfBFloat16(static_cast<uint32_t>(coded.scale)));
    for (int i = 0; i < Machine::kParts; ++i) {
      x[i] = times(Machine::toFloats((coded.codes[i] ^ 0x80) - 0x80), scale);
    }
  }

 private:
  template <class Machine, bool kIsStochastic>
  static BAGUA_GROUP Coded<Machine> multiples(const typename Machine::Floats (&x)[Machine::kParts], const Scale& scale,
                                              const Draw& draw) {
    Coded<Machine> coded;
    coded.scale = scale.bits;
    const auto reciprocal = Machine::floats(scale.reciprocal);
    for (int i = 0; i < Machine::kParts; ++i) {
      auto level = times(x[i], reciprocal);
      // The scale is rounded up, so that the nearest level is never beyond the last; the next one may be.
      if constexpr (kIsStochastic) {
        level = floorOf<Machine>(level + uniform<Machine>(draw, i));
        level = Machine::select(level > 127.0F, Machine::floats(127.0F), level);
        level = Machine::select(level < -127.0F, Machine::floats(-127.0F), level);
      }
      coded.codes[i] = Machine::bits(level + kRounder) & 0xFF;
    }
    return coded;
  }

  template <class Machine>
  static BAGUA_GROUP Machine::Floats floorOf(typename Machine::Floats x) {
    const auto nearest = (x + kRounder) - kRounder;
    return nearest - Machine::select(nearest > x, Machine::floats(1.0F), Machine::floats(0.0F));
  }
};

}  // namespace bagua::block_scaled
