// SPDX-License-Identifier: Apache-2.0
// The packets of the original, bit for bit, and where bagua departs from it. tests/contract has what every codec does.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "kernels/codec.h"

namespace bagua {
namespace {

constexpr int64_t kHeaderBytes = 32;
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

const Codec& codec() { return *CodecRegistry::find("minmax_uint8").codec; }

// A row for each chunk.
at::Tensor packed(const at::Tensor& values, int64_t chunks = 1) {
  const int64_t chunkLength = (values.numel() + chunks - 1) / chunks;
  at::Tensor rows = at::full({chunks, codec().layout().packedBytes(chunkLength)}, 0xA5, at::kByte);
  codec().encodeChunks(values, chunkLength, {}, rows);
  return rows;
}

at::Tensor unpacked(const at::Tensor& rows, const at::Tensor& like) {
  at::Tensor values = at::full_like(like, 7);
  codec().decodeChunks(rows, (like.numel() + rows.size(0) - 1) / rows.size(0), values);
  return values;
}

at::Tensor roundTrip(const at::Tensor& values, int64_t chunks = 1) { return unpacked(packed(values, chunks), values); }

at::Tensor codesOf(const at::Tensor& rows, int64_t count) { return rows[0].narrow(0, kHeaderBytes, count); }

at::Tensor bytes(const std::vector<int>& values) { return at::tensor(values).to(at::kByte); }

at::Tensor computed(const at::Tensor& values) {
  return values.to(values.dtype() == at::kDouble ? at::kDouble : at::kFloat);
}

TEST(MinMaxUint8, CodesTheOriginalsGoldenVectors) {
  const at::Tensor first = at::tensor({-1.F, -.5F, 0.F, .25F, 1.F});
  EXPECT_TRUE(codesOf(packed(first), 5).equal(bytes({0, 63, 127, 159, 255})));
  EXPECT_TRUE(roundTrip(first).equal(at::tensor({-.996078432F, -.501960814F, 0.F, .250980407F, 1.00392163F})));
  const at::Tensor second = at::tensor({0.F, .1F, .2F, .3F, .4F, .5F, .6F, .7F});
  EXPECT_TRUE(codesOf(packed(second), 8).equal(bytes({0, 36, 73, 109, 146, 182, 219, 255})));
  EXPECT_TRUE(codesOf(packed(at::tensor({-5.F, -4.F, -3.F, -1.F})), 4).equal(bytes({0, 64, 128, 255})));
  EXPECT_TRUE(codesOf(packed(at::zeros({3})), 3).equal(bytes({255, 255, 255})));
  EXPECT_TRUE(roundTrip(at::zeros({3})).equal(at::zeros({3})));
}

// The original's formula in tensor operations, for chunks that need none of our departures.
TEST(MinMaxUint8, FollowsTheOriginalsFormula) {
  at::manual_seed(1);
  for (const auto dtype : kTypes) {
    for (const int64_t length : {2, 31, 32, 33, 1000, 40'001}) {
      const at::Tensor x = at::randn({length}).to(dtype);
      const at::Tensor values = computed(x);
      const at::Tensor low = values.min();
      const at::Tensor high = values.max();
      // A number over a tensor would be a product with its reciprocal.
      const at::Tensor scale = at::full_like(low, 255) / (high - low + at::full_like(low, 1e-7));
      const at::Tensor upper = (high * scale).round();
      const at::Tensor codes = (at::minimum((values * scale).round(), upper) - (upper - 255)).clamp(0, 255);
      const at::Tensor row = packed(x)[0];
      EXPECT_TRUE(row.narrow(0, 0, 2 * x.element_size()).clone().view(dtype).equal(at::stack({low, high}).to(dtype)));
      at::Tensor expected = at::zeros_like(row);
      expected.narrow(0, 0, 2 * x.element_size()).copy_(row.narrow(0, 0, 2 * x.element_size()));
      expected.narrow(0, kHeaderBytes, length).copy_(codes);
      EXPECT_TRUE(row.equal(expected)) << dtype << ' ' << length;
      EXPECT_TRUE(roundTrip(x).equal(((codes + (upper - 255)) / scale).to(dtype))) << dtype << ' ' << length;
    }
  }
}

TEST(MinMaxUint8, GivesTheLastChunksFewerElementsOrNone) {
  const at::Tensor values = at::arange(9, at::kFloat);
  const at::Tensor rows = packed(values, 5);
  EXPECT_EQ(rows.size(1), 64);
  EXPECT_TRUE(rows[4].narrow(0, 0, 8).clone().view(at::kFloat).equal(at::tensor({8.F, 8.F})));
  EXPECT_TRUE(roundTrip(values, 5).sub(values).abs().max().item<float>() <= 1.F / 510 * 1.001F);
  EXPECT_FALSE(packed(values, 6)[5].any().item<bool>());
  EXPECT_FALSE(packed(at::empty({0}), 2).any().item<bool>());
}

TEST(MinMaxUint8, DecodesAConstantChunkToItself) {
  for (const auto dtype : kTypes) {
    for (const double constant : {1.0, -1.0, 1e-3, 6e-8, -1e-5, 65504.0, 0.0, -0.0, 12345.678, 1e-4}) {
      const at::Tensor values = at::full({50}, constant, dtype);
      EXPECT_TRUE(roundTrip(values, 3).equal(values)) << dtype << ' ' << constant;
    }
  }
}

TEST(MinMaxUint8, DecodesANarrowRangeExactly) {
  // Consecutive floats, of which up to 256 have a code each, so that they come back exactly.
  for (const int64_t count : {2, 3, 50, 100, 200}) {
    const at::Tensor ramp = at::arange(count, at::kFloat) * 0x1p-9F + 30000.F;
    EXPECT_TRUE(roundTrip(ramp).equal(ramp)) << count;
    EXPECT_TRUE(roundTrip(-ramp).equal(-ramp)) << count;
  }
  const at::Tensor doubles = at::arange(100, at::kDouble) * 0x1p-26 + 1e8;
  EXPECT_TRUE(roundTrip(doubles).equal(doubles));
}

TEST(MinMaxUint8, NeverWrapsAtTheEdgeOfTheNarrowRange) {
  // Maxima whose level lies on either side of 2^24, where upper - 255 stops to be a float.
  for (int quarter = 0; quarter < 800; ++quarter) {
    const float high = 65700 + 0.25F * static_cast<float>(quarter);
    for (const float sign : {1.F, -1.F}) {
      const at::Tensor values = at::tensor({sign * high, sign * (high - 0.5F), sign * (high - 1.F)});
      EXPECT_LE((roundTrip(values) - values).abs().max().item<float>(), 1.F / 510 + 0x1p-7F) << sign * high;
    }
  }
}

TEST(MinMaxUint8, DecodesTheWholeChunkOfANonFiniteValueToNan) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const auto dtype : kTypes) {
    for (const double poison : {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity}) {
      for (const int64_t position : {300, 450, 599}) {
        at::Tensor values = at::ones({900}, dtype);
        values[position] = poison;
        const at::Tensor chunks = roundTrip(values, 3).view({3, 300});
        EXPECT_TRUE(chunks[1].isnan().all().item<bool>());
        EXPECT_TRUE(chunks[0].eq(1).all().item<bool>() && chunks[2].eq(1).all().item<bool>());
      }
    }
  }
}

TEST(MinMaxUint8, KeepsARangeBeyondTheLargestNumberFinite) {
  for (const auto& [dtype, largest] : {std::pair(at::kFloat, 3.4e38), {at::kHalf, 65504}, {at::kDouble, 1.7e308}}) {
    const at::Tensor values = (at::tensor({-1.0, 0.0, 1.0 / 3, 1.0}, at::kDouble) * largest).to(dtype);
    const at::Tensor error = roundTrip(values).to(at::kDouble) / largest - values.to(at::kDouble) / largest;
    EXPECT_LE(error.abs().max().item<double>(), 1.01 / 255) << dtype;
  }
}

TEST(MinMaxUint8, GivesTheSameBytesForEitherZero) {
  EXPECT_TRUE(packed(at::tensor({0.F, -0.F, 1.F})).equal(packed(at::tensor({-0.F, 0.F, 1.F}))));
  EXPECT_TRUE(packed(at::full({9}, -0.0F)).equal(packed(at::zeros({9}))));
}

TEST(MinMaxUint8, DecodesAHeaderThatIsNotInOrderToNan) {
  const at::Tensor values = at::arange(64, at::kFloat);
  const at::Tensor rows = packed(values);
  rows[0].narrow(0, 0, 8).copy_(at::tensor({5.F, -5.F}).view(at::kByte));
  EXPECT_TRUE(unpacked(rows, values).isnan().all().item<bool>());
}

// The partial sums and the tree of the original, in tensor operations.
at::Tensor originalSum(const std::vector<at::Tensor>& copies) {
  const size_t n = copies.size();
  const size_t count = n <= 4 ? 2 : n <= 8 ? 4 : n <= 16 ? 8 : n <= 32 ? 16 : 32;
  std::vector<at::Tensor> sums(count, at::zeros_like(computed(copies[0])));
  for (size_t copy = 0; copy < n; ++copy) sums[copy % count] = sums[copy % count] + computed(copies[copy]);
  for (size_t half = count / 2; half > 0; half /= 2) {
    for (size_t part = 0; part < half; ++part) sums[part] = sums[part] + sums[part + half];
  }
  return sums[0];
}

TEST(MinMaxUint8, AddsCopiesInTheOriginalsOrder) {
  at::manual_seed(4);
  for (const auto dtype : kTypes) {
    for (const int64_t count : {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 70}) {
      for (const int64_t length : {0, 1, 17, 3000}) {
        std::vector<at::Tensor> rows;
        std::vector<at::Tensor> decoded;
        for (int64_t copy = 0; copy < count; ++copy) {
          const at::Tensor values = (at::randn({length}) * 3).to(dtype);
          rows.push_back(packed(values)[0]);
          decoded.push_back(roundTrip(values));
        }
        at::Tensor mean = at::full({length}, 7, dtype);
        at::Tensor coded = at::full_like(rows[0], 0xA5);
        codec().decodeMeanAndEncode(at::stack(rows), static_cast<double>(count), {}, mean, coded);
        EXPECT_TRUE(mean.equal((originalSum(decoded) / static_cast<double>(count)).to(dtype))) << count << " copies";
        EXPECT_TRUE(coded.equal(packed(mean)[0])) << count << " copies of " << length;
      }
    }
  }
}

}  // namespace
}  // namespace bagua
