// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8_decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <type_traits>

// What the GPU computes for a code, computed on the CPU: bit for bit what the division would give.
namespace bagua::minmax_uint8 {
namespace {

template <class T>
class DecoderTest : public ::testing::Test {
 protected:
  using Bits = std::conditional_t<sizeof(T) == sizeof(float), uint32_t, uint64_t>;

  // How many codes of the grid decode to other bits than by division.
  static int differences(const Decoder<T>& decoder) {
    int found = 0;
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      found += bitCast<Bits>(decode(byte, decoder)) != bitCast<Bits>(dequantize(byte, decoder.grid)) ? 1 : 0;
    }
    return found;
  }

  // Any sign and any mantissa, of a magnitude within 2^-exponent and 2^exponent.
  T valueWithin(double exponent) {
    const double magnitude = std::exp2(std::uniform_real_distribution<double>(-exponent, exponent)(random_));
    return static_cast<T>(random_() % 2 == 0 ? magnitude : -magnitude);
  }

  std::mt19937_64 random_{7};  // NOLINT(bugprone-random-generator-seed): the same in every run
};

using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(DecoderTest, Types);

TYPED_TEST(DecoderTest, DecodesAnyRangeAsTheDivisionDoes) {
  int tame = 0;
  for (int i = 0; i < 40'000; ++i) {
    const TypeParam one = this->valueWithin(i % 2 == 0 ? 4 : 40);
    const TypeParam other = this->valueWithin(i % 2 == 0 ? 4 : 40);
    const auto decoder = makeDecoder(makeGrid<TypeParam>({std::min(one, other), std::max(one, other)}));
    if (decoder.reciprocal == 0) continue;
    ++tame;
    ASSERT_EQ(this->differences(decoder), 0) << one << " to " << other;
  }
  EXPECT_EQ(tame, 40'000);
}

TYPED_TEST(DecoderTest, DecodesNarrowRangesAsTheDivisionDoes) {
  for (int i = 0; i < 20'000; ++i) {
    const TypeParam low = this->valueWithin(20);
    TypeParam high = low;
    for (int step = 0; step <= i % 300; ++step) high = std::nextafter(high, std::numeric_limits<TypeParam>::infinity());
    const auto decoder = makeDecoder(makeGrid<TypeParam>({low, high}));
    if (decoder.reciprocal == 0) continue;
    ASSERT_EQ(this->differences(decoder), 0) << low << " to " << high;
  }
}

TYPED_TEST(DecoderTest, DividesAsTheDivisionDoesByMantissasOfEveryKind) {
  using T = TypeParam;
  for (int i = 0; i < 200'000; ++i) {
    T scale = std::abs(this->valueWithin(50));
    if (i % 4 == 1) scale = std::nextafter(std::exp2(std::floor(std::log2(scale))), T{0});  // all ones
    if (i % 4 == 2) scale = std::exp2(std::floor(std::log2(scale)));
    const auto level = static_cast<T>(static_cast<int64_t>(this->random_() % (2U << 24U)) - (1 << 24));
    ASSERT_EQ(quotient(level, scale, T{1} / scale), level / scale) << level << " / " << scale;
  }
}

TYPED_TEST(DecoderTest, LeavesScalesNearTheEndsOfTheTypeToTheDivision) {
  using T = TypeParam;
  constexpr T kMax = std::numeric_limits<T>::max();
  EXPECT_EQ(makeDecoder(makeGrid<T>({-kMax, kMax})).reciprocal, T{0});
  EXPECT_NE(makeDecoder(makeGrid<T>({T{-1}, T{1}})).reciprocal, T{0});
}

}  // namespace
}  // namespace bagua::minmax_uint8
