// SPDX-License-Identifier: Apache-2.0
// The block codecs against a second implementation, written from kernels/README.md alone: element by element, with
// tables and searches where the codecs compute. What every codec promises is in tests/contract.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/codec.h"

namespace bagua {
namespace {

constexpr int kGroup = 128;
using Numbers = std::array<float, kGroup>;
using Bytes = std::vector<uint8_t>;

uint64_t splitMix(uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

bool isNegated(uint64_t key, int64_t group, int element) {
  const uint64_t word = splitMix(splitMix(key) + 3 * static_cast<uint64_t>(group) + (element < 64 ? 0 : 1));
  return (word >> static_cast<unsigned>(element % 64) & 1U) != 0;
}

// 2^-24 times an integer.
float chanceOf(uint64_t key, int64_t group, int element) {
  const uint64_t word = splitMix(splitMix(key) + 3 * static_cast<uint64_t>(group) + 2);
  uint32_t x = static_cast<uint32_t>(element) * 0x9E3779B9U + static_cast<uint32_t>(word);
  x ^= x >> 16U;
  x *= 0x7FEB352DU;
  x ^= (x >> 15U) ^ static_cast<uint32_t>(word >> 32U);
  x *= 0x846CA68BU;
  x ^= x >> 16U;
  return std::ldexp(static_cast<float>(x >> 8U), -24);
}

float toBFloat16(float x, bool isRoundedUp) {
  int exponent = 0;
  const float fraction = std::frexp(x, &exponent) * 256;  // Eight bits in front of the point.
  return std::ldexp(isRoundedUp ? std::ceil(fraction) : std::nearbyint(fraction), exponent - 8);
}

void appendBFloat16(float x, Bytes& bytes) {
  const uint32_t bits = std::bit_cast<uint32_t>(x) >> 16U;
  bytes.push_back(static_cast<uint8_t>(bits));
  bytes.push_back(static_cast<uint8_t>(bits >> 8U));
}

void appendCodes(const std::array<int, kGroup>& codes, int bits, Bytes& bytes) {
  const int count = kGroup * bits / 8;
  for (int j = 0; j < count; ++j) {
    int byte = 0;
    for (int k = 0; k < 8 / bits; ++k) byte += codes[j + k * count] << (k * bits);
    bytes.push_back(static_cast<uint8_t>(byte));
  }
}

float largestOf(const float* x, int count) {
  float largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::abs(x[i]));
  return largest;
}

// Added up in halves.
float sumOf(const Numbers& x) {
  std::vector<float> sums(x.begin(), x.end());
  while (sums.size() > 1) {
    const size_t half = sums.size() / 2;
    for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    sums.resize(half);
  }
  return sums[0];
}

void hadamard(Numbers& x) {
  for (int stride = kGroup / 2; stride > 0; stride /= 2) {
    const Numbers before = x;
    for (int i = 0; i < kGroup; ++i) {
      const bool isFirst = i / stride % 2 == 0;
      x[i] = isFirst ? before[i] + before[i + stride] : before[i - stride] - before[i];
    }
  }
}

struct Group {
  Numbers x;
  int64_t number;
  Encoding encoding;

  [[nodiscard]] bool isStochastic() const { return encoding.rounding == Rounding::kStochastic; }
  [[nodiscard]] float chance(int element) const { return chanceOf(encoding.key, number, element); }
};

Bytes int8Bytes(const Group& group) {
  const float scale = toBFloat16(largestOf(group.x.data(), kGroup) / 127.0F, true);
  std::array<int, kGroup> codes{};
  for (int i = 0; i < kGroup; ++i) {
    const float level = group.x[i] * (1.0F / scale);
    const float rounded = group.isStochastic() ? std::floor(level + group.chance(i)) : std::nearbyint(level);
    codes[i] = static_cast<int>(std::clamp(rounded, -127.0F, 127.0F)) & 0xFF;
  }
  Bytes bytes;
  appendBFloat16(scale, bytes);
  appendCodes(codes, 8, bytes);
  return bytes;
}

constexpr float kLevels[] = {0, 2, 4, 6, 9, 12, 16, 22};

// The six-bit scales in units, by their codes.
float unitsOf(int code) {
  return code < 8 ? static_cast<float>(code) : std::ldexp(static_cast<float>(8 + code % 8), code / 8 - 1);
}

int scaleCode(float units, bool isRoundedUp) {
  int best = 0;
  for (int code = 0; code < 64; ++code) {
    const float distance = std::abs(unitsOf(code) - units);
    const float leastSoFar = std::abs(unitsOf(best) - units);
    if (isRoundedUp ? unitsOf(best) < units : distance < leastSoFar || (distance == leastSoFar && code % 2 == 0)) {
      best = code;
    }
  }
  return best;
}

int levelOf(float magnitude, const Group& group, int element) {
  int below = 0;
  while (below < 7 && magnitude >= kLevels[below + 1]) ++below;
  if (below == 7) return below;
  const float gap = kLevels[below + 1] - kLevels[below];
  if (group.isStochastic()) return magnitude - kLevels[below] > gap * group.chance(element) ? below + 1 : below;
  return magnitude >= kLevels[below] + gap / 2 ? below + 1 : below;
}

Bytes fourBitBytes(const Group& group) {
  const float largest = largestOf(group.x.data(), kGroup) * (1.0F / 22);
  // The exponent of the largest scale, after its mantissa was rounded to three bits.
  int exponent = 0;
  const float fraction = std::frexp(largest, &exponent) * 16;
  if ((group.isStochastic() ? std::ceil(fraction) : std::nearbyint(fraction)) == 16) ++exponent;
  exponent += 126;
  uint64_t scale = static_cast<uint64_t>(exponent);
  std::array<int, kGroup> codes{};
  for (int block = 0; block < 8; ++block) {
    const float* x = group.x.data() + 16 * static_cast<ptrdiff_t>(block);
    const float units = std::ldexp(largestOf(x, 16) * (1.0F / 22), 9 + 127 - exponent);
    const int code = scaleCode(units, group.isStochastic());
    scale += static_cast<uint64_t>(code) << static_cast<unsigned>(8 + 6 * block);
    const float reciprocal = code == 0 ? 0 : 1.0F / std::ldexp(unitsOf(code), exponent - 127 - 9);
    for (int i = 0; i < 16; ++i) {
      codes[16 * block + i] =
          levelOf(std::abs(x[i]) * reciprocal, group, 16 * block + i) + (std::signbit(x[i]) ? 8 : 0);
    }
  }
  Bytes bytes;
  for (unsigned i = 0; i < 7; ++i) bytes.push_back(static_cast<uint8_t>(scale >> (8 * i)));
  appendCodes(codes, 4, bytes);
  return bytes;
}

Numbers rotated(const Group& group) {
  Numbers y = group.x;
  for (int i = 0; i < kGroup; ++i) {
    y[i] *= (isNegated(group.encoding.key, group.number, i) ? -1.0F : 1.0F) / 65536;
  }
  hadamard(y);
  return y;
}

Bytes twoBitBytes(const Group& group) {
  const Numbers y = rotated(group);
  Numbers magnitudes{};
  for (int i = 0; i < kGroup; ++i) magnitudes[i] = std::abs(y[i]);
  std::array<int, kGroup> codes{};
  float scale = 0;
  if (group.isStochastic()) {
    scale = toBFloat16(largestOf(y.data(), kGroup) / 3.25F * 512, true);
    for (int i = 0; i < kGroup; ++i) {
      const float level = y[i] * (1.0F / (scale / 512));
      const float chance = group.chance(i);
      const bool isNegative = std::abs(level) >= 1 ? level < 0 : level + 1 <= 2 * chance;
      codes[i] = (std::abs(level) - 1 > chance * 2.25F ? 2 : 0) + (isNegative ? 1 : 0);
    }
  } else {
    const float bound = sumOf(magnitudes) * (1.25F / 128);
    Numbers products{};
    int large = 0;
    for (int i = 0; i < kGroup; ++i) {
      const bool isLarge = magnitudes[i] > bound;
      large += isLarge ? 1 : 0;
      products[i] = magnitudes[i] * (isLarge ? 3.25F : 1.0F);
      codes[i] = (isLarge ? 2 : 0) + (std::signbit(y[i]) ? 1 : 0);
    }
    const float squares = 128 + static_cast<float>(large) * (3.25F * 3.25F - 1);
    scale = toBFloat16(sumOf(products) / squares * 512, false);
  }
  Bytes bytes;
  appendBFloat16(scale, bytes);
  appendCodes(codes, 2, bytes);
  return bytes;
}

Bytes oneBitBytes(const Group& group) {
  const Numbers y = rotated(group);
  Numbers magnitudes{};
  for (int i = 0; i < kGroup; ++i) magnitudes[i] = std::abs(y[i]);
  const float size = group.isStochastic() ? largestOf(y.data(), kGroup) : sumOf(magnitudes) / 128;
  const float scale = toBFloat16(size * 512, group.isStochastic());
  std::array<int, kGroup> codes{};
  for (int i = 0; i < kGroup; ++i) {
    const bool isBelow = y[i] * (1.0F / (scale / 512)) + 1 <= 2 * group.chance(i);
    codes[i] = (group.isStochastic() ? isBelow : std::signbit(y[i])) ? 1 : 0;
  }
  Bytes bytes;
  appendBFloat16(scale, bytes);
  appendCodes(codes, 1, bytes);
  return bytes;
}

struct Format {
  const char* name;
  Bytes (*bytesOf)(const Group&);
  bool hasKey;
  double bits;
  double error;  // On any distribution.
};

constexpr Format kFormats[] = {{"int8", int8Bytes, false, 8.125, 1e-3},
                               {"4bit", fourBitBytes, false, 4.4375, 0.010},
                               {"2bit", twoBitBytes, true, 2.125, 0.12},
                               {"1bit", oneBitBytes, true, 1.125, 0.37}};

class BlockCodecs : public ::testing::TestWithParam<Format> {
 protected:
  void SetUp() override { at::manual_seed(3); }

  [[nodiscard]] static const Codec& codec() { return *CodecRegistry::find(GetParam().name).codec; }

  [[nodiscard]] static at::Tensor encoded(const at::Tensor& values, const Encoding& encoding) {
    at::Tensor packed = at::empty({codec().layout().packedBytes(values.numel())}, at::kByte);
    codec().start(values, encoding, packed);
    codec().encode(values, {0, values.numel()}, encoding, packed);
    return packed;
  }

  [[nodiscard]] static double errorOn(const at::Tensor& values, const Encoding& encoding = {}) {
    at::Tensor decoded = at::empty_like(values);
    codec().decode(encoded(values, encoding), {0, values.numel()}, decoded);
    const auto norm = [](const at::Tensor& x) { return x.to(at::kDouble).square().sum().item<double>(); };
    return norm(decoded - values) / norm(values);
  }

  [[nodiscard]] static at::Tensor runsOfScales(int64_t length, int64_t run) {
    const at::Tensor scales = at::pow(10.0, at::rand({length / run}) * 3).repeat_interleave(run);
    return at::randn({length}) * scales;
  }
};

INSTANTIATE_TEST_SUITE_P(Every, BlockCodecs, ::testing::ValuesIn(kFormats), [](const auto& it) {
  return std::string(it.param.name[0] == 'i' ? "" : "of") + it.param.name;
});

TEST_P(BlockCodecs, WriteTheBytesOfTheReference) {
  for (const auto rounding : {Rounding::kNearest, Rounding::kStochastic}) {
    for (const at::Tensor& values :
         {at::randn({100 * kGroup}), runsOfScales(100 * kGroup, 16) * 1e-9, at::randn({100 * kGroup}).pow(5),
          at::randint(-30, 31, {100 * kGroup}).to(at::kFloat)}) {
      const Encoding encoding{.rounding = rounding, .key = 0x0123456789ABCDEF};
      const at::Tensor packed = encoded(values, encoding);
      Bytes expected;
      for (unsigned i = 0; GetParam().hasKey && i < 8; ++i) {
        expected.push_back(static_cast<uint8_t>(encoding.key >> (8 * i)));
      }
      for (int64_t number = 0; number < values.numel() / kGroup; ++number) {
        Group group{{}, number, encoding};
        std::memcpy(group.x.data(), values.const_data_ptr<float>() + number * kGroup, sizeof(group.x));
        const Bytes bytes = GetParam().bytesOf(group);
        expected.insert(expected.end(), bytes.begin(), bytes.end());
      }
      ASSERT_EQ(expected.size(), static_cast<size_t>(packed.numel()));
      const auto* bytes = packed.const_data_ptr<uint8_t>();
      for (size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(bytes[i], expected[i]) << "byte " << i;
    }
  }
}

TEST_P(BlockCodecs, CostWhatTheySay) {
  constexpr int64_t kLength = 1'000'000;
  const auto bytes = static_cast<double>(codec().layout().packedBytes(kLength));
  EXPECT_LT(8 * bytes / kLength, GetParam().bits + 0.001);
  EXPECT_EQ(CodecRegistry::find(GetParam().name).bitsPerElement(), GetParam().bits);
}

TEST_P(BlockCodecs, LoseLittleOfAnyDistribution) {
  constexpr int64_t kLength = int64_t{1} << 19;
  const at::Tensor laplace = at::empty({kLength}).exponential_() * at::randint(2, {kLength}).mul_(2).sub_(1);
  const auto normal = [] { return at::randn({kLength}); };
  const at::Tensor studentT3 = normal() / ((normal().square() + normal().square() + normal().square()) / 3).sqrt();
  EXPECT_LT(errorOn(normal()), GetParam().error);
  EXPECT_LT(errorOn(laplace), GetParam().error);
  EXPECT_LT(errorOn(studentT3), GetParam().error);
  for (const int64_t run : {64, 128, 4096}) EXPECT_LT(errorOn(runsOfScales(kLength, run)), GetParam().error) << run;
}

// What makes error feedback fail is a residual that the same rounding meets again and again.
TEST_P(BlockCodecs, LoseNoMoreAfterManyStepsWithFeedback) {
  constexpr int64_t kLength = 1 << 15;
  const at::Tensor gradient = runsOfScales(kLength, 128);
  const at::Tensor residual = at::zeros({kLength});
  at::Tensor packed = at::empty({codec().layout().packedBytes(kLength)}, at::kByte);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 200; ++step) {
    const at::Tensor noisy = gradient * 0.3 + at::randn({kLength}) * gradient.abs();
    const at::Tensor h = noisy + residual;
    const Encoding encoding{.key = static_cast<uint64_t>(step), .residual = residual, .nextResidual = residual};
    codec().start(noisy, encoding, packed);
    codec().encode(noisy, {0, kLength}, encoding, packed);
    const auto norm = [](const at::Tensor& x) { return x.to(at::kDouble).square().sum().item<double>(); };
    const double error = norm(residual) / norm(h);
    if (step == 0) first = error;
    if (step >= 190) last += error / 10;
  }
  EXPECT_LT(last, 1.2 * first);
}

}  // namespace
}  // namespace bagua
