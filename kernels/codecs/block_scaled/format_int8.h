// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/codecs/block_scaled/format.h"

namespace bagua::block_scaled {

// Every element as a multiple of a power of two, from -127 to 127, in a byte.
struct EightBits {
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 2;
  static constexpr bool kIsRotated = false;

  template <class Machine, bool kIsStochastic>
  static BAGUA_GROUP Coded<Machine> code(typename Machine::Floats (&x)[Machine::kParts], const Draw& draw) {
    const float largest = Machine::largest(x);
    const Content content = contentOf(largest);
    if (largest > kLargest) clampToLargest<Machine>(x);
    Coded<Machine> coded;
    // One way to the codes, on which they stay in registers.
    auto reciprocal = Machine::floats(0.0F);
    if (content == Content::kNumbers) {
      coded.scale = bfloat16OfFloat((largest < kLargest ? largest : kLargest) / 127.0F, true);
      reciprocal = Machine::floats(1.0F / floatOfBFloat16(static_cast<uint32_t>(coded.scale)));
    } else {
      coded.scale = content == Content::kNan ? kNanScale : 0;
      for (int i = 0; i < Machine::kParts; ++i) x[i] = Machine::floats(0.0F);
    }
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
  template <class Machine>
  static BAGUA_GROUP Machine::Floats floorOf(typename Machine::Floats x) {
    const auto nearest = (x + kRounder) - kRounder;
    return nearest - Machine::select(nearest > x, Machine::floats(1.0F), Machine::floats(0.0F));
  }
};

}  // namespace bagua::block_scaled
