// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/codecs/minmax_uint8/minmax_uint8_cpu.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_loops.h"

// Every set of vector loops that this machine can run against the plain one, bit for bit.
namespace bagua::minmax_uint8::cpu {
namespace {

constexpr size_t kMost = 5000;

// The same values in every run, so that a failure can be looked at again.
std::mt19937_64 randomBits(unsigned seed) {
  return std::mt19937_64(seed);  // NOLINT(bugprone-random-generator-seed)
}

template <class Element>
using BitsOf =
    std::conditional_t<sizeof(Element) == 2, uint16_t, std::conditional_t<sizeof(Element) == 4, uint32_t, uint64_t>>;

template <class Element>
bool sameBits(const std::vector<Element>& a, const std::vector<Element>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(Element)) == 0;
}

template <class Element>
Element elementOf(double value) {
  using T = ElementTraits<Element>::Compute;
  return ElementTraits<Element>::store(static_cast<T>(value));
}

// Values of one kind each: plain, tiny, denormal, nearly constant, constant, huge, and any bits that are finite.
template <class Element>
std::vector<std::vector<Element>> finiteInputs() {
  std::mt19937_64 random = randomBits(5);
  std::normal_distribution<double> normal;
  const double kMax = static_cast<double>(ElementTraits<Element>::kMaxFinite);
  std::vector<std::vector<Element>> inputs(7, std::vector<Element>(kMost));
  for (size_t i = 0; i < kMost; ++i) {
    const double x = normal(random);
    inputs[0][i] = elementOf<Element>(x);
    inputs[1][i] = elementOf<Element>(x * 1e-6);
    inputs[2][i] = bitCast<Element>(static_cast<BitsOf<Element>>(random() % 1000));
    inputs[3][i] = elementOf<Element>(1000 + x * 1e-4);
    inputs[4][i] = elementOf<Element>(-3.7);
    inputs[5][i] = elementOf<Element>(std::max(-1.0, std::min(1.0, x)) * kMax);
    do {
      inputs[6][i] = bitCast<Element>(static_cast<BitsOf<Element>>(random()));
    } while (!isFinite(ElementTraits<Element>::load(inputs[6][i])));
  }
  return inputs;
}

std::vector<size_t> lengths() {
  std::vector<size_t> result;
  for (size_t length = 0; length <= 200; ++length) result.push_back(length);
  result.insert(result.end(), {255, 256, 257, 1023, 1024, 1025, 4096, 4099});
  return result;
}

template <class Element>
class VectorLoopsTest : public ::testing::Test {
 public:
  // f(loops, input, length, offset) for each set of loops but the plain one.
  template <class F>
  void forAll(const F& f) {
    for (const Loops* loops : availableLoops()) {
      if (loops == &scalarLoops()) continue;
      for (const auto& input : finiteInputs<Element>()) {
        for (const size_t length : lengths()) {
          SCOPED_TRACE(std::string(loops->name) + " length " + std::to_string(length));
          f(loops->of<Element>(), input.data() + length % 5, static_cast<int64_t>(length));
          if (this->HasFatalFailure()) return;
        }
      }
    }
  }

  static bool allSeeThatItIsNotFinite(const std::vector<Element>& x) {
    const auto size = static_cast<int64_t>(x.size());
    const auto& all = availableLoops();
    return std::none_of(all.begin(), all.end(), [&](const Loops* loops) {
      return makeGrid<Element>(headerRange(loops->of<Element>().range(x.data(), size), size)).finite();
    });
  }

  static auto gridOf(const Element* x, int64_t length) {
    return makeGrid<Element>(headerRange(plain().range(x, length), length));
  }

  static const ElementLoops<Element>& plain() { return scalarLoops().of<Element>(); }
};

using Elements = ::testing::Types<float, double, HalfBits, BFloat16Bits>;
TYPED_TEST_SUITE(VectorLoopsTest, Elements);

TYPED_TEST(VectorLoopsTest, FindTheSameRange) {
  using T = ElementTraits<TypeParam>::Compute;
  this->forAll([&](const auto& loops, const TypeParam* x, int64_t length) {
    const Range<T> expected = headerRange(this->plain().range(x, length), length);
    const Range<T> range = headerRange(loops.range(x, length), length);
    // As bits: NaN must be the same one, and zeros have the same sign.
    ASSERT_EQ(bitCast<BitsOf<T>>(range.low), bitCast<BitsOf<T>>(expected.low));
    ASSERT_EQ(bitCast<BitsOf<T>>(range.high), bitCast<BitsOf<T>>(expected.high));
  });
}

TYPED_TEST(VectorLoopsTest, SeeANonFiniteValueAnywhere) {
  using T = ElementTraits<TypeParam>::Compute;
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  for (const T poison : {ElementTraits<T>::nan(), -ElementTraits<T>::nan(), kInfinity, -kInfinity}) {
    for (size_t length = 1; length < 300; ++length) {
      for (size_t position = 0; position < length; position += 1 + length / 20) {
        std::vector<TypeParam> x(length, elementOf<TypeParam>(1));
        x[position] = ElementTraits<TypeParam>::store(poison);
        ASSERT_TRUE(this->allSeeThatItIsNotFinite(x)) << length << ' ' << position;
      }
    }
  }
}

TYPED_TEST(VectorLoopsTest, MakeTheSameCodes) {
  this->forAll([&](const auto& loops, const TypeParam* x, int64_t length) {
    const auto grid = this->gridOf(x, length);
    const auto size = static_cast<size_t>(length);
    std::vector<uint8_t> expected(size + 3, 0xA5);
    this->plain().quantize(x, expected.data() + 1, length, grid, false);
    for (const bool bypassCache : {false, true}) {
      std::vector<uint8_t> codes(size + 3, 0xA5);
      loops.quantize(x, codes.data() + 1, length, grid, bypassCache);
      ASSERT_TRUE(sameBits(codes, expected));
    }
  });
}

TYPED_TEST(VectorLoopsTest, MakeTheSameValues) {
  std::vector<uint8_t> codes(kMost);
  std::mt19937_64 random = randomBits(6);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
  this->forAll([&](const auto& loops, const TypeParam* x, int64_t length) {
    const auto grid = this->gridOf(x, length);
    const auto size = static_cast<size_t>(length);
    std::vector<TypeParam> expected(size + 3, elementOf<TypeParam>(9));
    this->plain().dequantize(codes.data() + 1, expected.data() + 1, length, grid, false);
    for (const bool bypassCache : {false, true}) {
      std::vector<TypeParam> values(size + 3, elementOf<TypeParam>(9));
      loops.dequantize(codes.data() + 1, values.data() + 1, length, grid, bypassCache);
      ASSERT_TRUE(sameBits(values, expected));
    }
  });
}

TYPED_TEST(VectorLoopsTest, MakeTheSameSums) {
  using T = ElementTraits<TypeParam>::Compute;
  std::mt19937_64 random = randomBits(7);
  for (const int64_t copies : {1, 2, 3, 5, 9, 17, 33, 70}) {
    constexpr int64_t kStride = 640;  // One header's offset off a multiple of 64, as in a packet.
    std::vector<uint8_t> codes(static_cast<size_t>(copies * kStride));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
    std::vector<Grid<T>> grids;
    for (int64_t copy = 0; copy < copies; ++copy) {
      const T low = static_cast<T>(copy % 7) - 3;
      grids.push_back(makeGrid<TypeParam>({low, low + static_cast<T>(copy % 3)}));
    }
    const ReduceSource<T> source = {codes.data(), kStride, copies, grids.data(), static_cast<T>(copies)};
    for (const size_t length : std::vector<size_t>{0, 1, 15, 16, 17, 600}) {
      std::vector<TypeParam> expected(length + 1, elementOf<TypeParam>(9));
      this->plain().reduce(source, expected.data(), static_cast<int64_t>(length));
      for (const Loops* loops : availableLoops()) {
        std::vector<TypeParam> sums(length + 1, elementOf<TypeParam>(9));
        loops->of<TypeParam>().reduce(source, sums.data(), static_cast<int64_t>(length));
        ASSERT_TRUE(sameBits(sums, expected)) << loops->name << ' ' << copies << " copies of " << length;
      }
    }
  }
}

TEST(VectorLoops, AreAvailableWhereTheProcessorHasThem) {
#if defined(__x86_64__)
  size_t expected = 1;
  if (__builtin_cpu_supports("avx2")) ++expected;
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) ++expected;
  EXPECT_EQ(availableLoops().size(), expected);
#endif
  EXPECT_STREQ(availableLoops().front()->name, "scalar");
}

TEST(HalfBits, ConvertToFloatAndBackWithoutLoss) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const HalfBits half = {static_cast<uint16_t>(bits)};
    const float value = ElementTraits<HalfBits>::load(half);
    if (value != value) continue;
    ASSERT_EQ(ElementTraits<HalfBits>::store(value).bits, bits);
  }
}

}  // namespace
}  // namespace bagua::minmax_uint8::cpu
