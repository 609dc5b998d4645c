// SPDX-License-Identifier: Apache-2.0
#include "kernels/elements.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

TEST(HalfBits, ConvertToFloatAndBackWithoutLoss) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const HalfBits half = {static_cast<uint16_t>(bits)};
    const float value = ElementTraits<HalfBits>::load(half);
    if (value != value) continue;
    ASSERT_EQ(ElementTraits<HalfBits>::store(value).bits, bits);
  }
}

}  // namespace
}  // namespace bagua
