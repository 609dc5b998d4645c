// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/intra_op_threads.h"

namespace bagua::minmax_uint8 {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

at::Tensor packed(const at::Tensor& input, int64_t chunks) {
  at::Tensor result = at::full({packedBytes(input.numel(), chunks)}, 0xA5, at::kByte);
  compress(input, chunks, result);
  return result;
}

at::Tensor unpacked(const at::Tensor& bytes, int64_t chunks, int64_t length, at::ScalarType dtype) {
  at::Tensor result = at::full({length}, 7, at::TensorOptions().dtype(dtype));
  decompress(bytes, chunks, result);
  return result;
}

at::Tensor roundTrip(const at::Tensor& input, int64_t chunks) {
  return unpacked(packed(input, chunks), chunks, input.numel(), input.scalar_type());
}

at::Tensor floats(const std::vector<float>& values) { return at::tensor(values); }

std::vector<int> codes(const at::Tensor& bytes, int64_t count) {
  const auto view = bytes.slice(0, 32, 32 + count).to(at::kInt);
  return {view.data_ptr<int>(), view.data_ptr<int>() + count};
}

std::vector<float> values(const at::Tensor& tensor) {
  const auto view = tensor.to(at::kFloat).contiguous();
  return {view.data_ptr<float>(), view.data_ptr<float>() + view.numel()};
}

TEST(MinMaxUint8, CodesTheOriginalsFirstGoldenVector) {
  const auto bytes = packed(floats({-1.F, -.5F, 0.F, .25F, 1.F}), 1);
  EXPECT_EQ(codes(bytes, 5), (std::vector<int>{0, 63, 127, 159, 255}));
  EXPECT_EQ(values(unpacked(bytes, 1, 5, at::kFloat)),
            (std::vector<float>{-.996078432F, -.501960814F, 0.F, .250980407F, 1.00392163F}));
}

TEST(MinMaxUint8, CodesTheOriginalsOtherGoldenVectors) {
  EXPECT_EQ(codes(packed(floats({0, .1F, .2F, .3F, .4F, .5F, .6F, .7F}), 1), 8),
            (std::vector<int>{0, 36, 73, 109, 146, 182, 219, 255}));
  EXPECT_EQ(codes(packed(floats({-5, -4, -3, -1}), 1), 4), (std::vector<int>{0, 64, 128, 255}));
  const auto zeros = packed(at::zeros({3}), 1);
  EXPECT_EQ(codes(zeros, 3), (std::vector<int>{255, 255, 255}));
  EXPECT_EQ(values(unpacked(zeros, 1, 3, at::kFloat)), (std::vector<float>{0, 0, 0}));
}

TEST(MinMaxUint8, LaysChunksOutAsHeaderCodesAndZeroPadding) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto input = at::tensor({3.F, -2.F, 0.F, 8.F, 4.F, 6.F, -7.F}).to(dtype);
    const auto bytes = packed(input, 3);
    ASSERT_EQ(bytes.numel(), 3 * 64);
    const float ranges[3][2] = {{-2, 3}, {4, 8}, {-7, -7}};
    const int64_t counts[3] = {3, 3, 1};
    for (int64_t chunk = 0; chunk < 3; ++chunk) {
      const auto piece = bytes.slice(0, chunk * 64, chunk * 64 + 64);
      const int64_t itemSize = input.element_size();
      EXPECT_EQ(values(piece.slice(0, 0, 2 * itemSize).view(dtype)),
                (std::vector<float>{ranges[chunk][0], ranges[chunk][1]}));
      EXPECT_EQ(piece.slice(0, 2 * itemSize, 32).count_nonzero().item<int64_t>(), 0);
      EXPECT_EQ(piece.slice(0, 32 + counts[chunk], 64).count_nonzero().item<int64_t>(), 0);
    }
  }
}

TEST(MinMaxUint8, GivesTheLastChunksFewerElementsOrNone) {
  EXPECT_EQ(chunkLength(9, 4), 3);
  EXPECT_EQ(packedBytes(9, 4), 4 * 64);
  const auto input = at::arange(9, at::kFloat);
  const auto bytes = packed(input, 4);
  EXPECT_EQ(bytes.slice(0, 3 * 64, 4 * 64).count_nonzero().item<int64_t>(), 0);
  EXPECT_LE((roundTrip(input, 4) - input).abs().max().item<float>(), 2.F / 510 * 1.001F);
  EXPECT_EQ(values(roundTrip(floats({5}), 40)), (std::vector<float>{5}));
  EXPECT_EQ(packed(at::empty({0}), 2).count_nonzero().item<int64_t>(), 0);
  EXPECT_EQ(roundTrip(at::empty({0}), 2).numel(), 0);
}

// The bound: half a step of the grid, and the roundings of x * scale and of the division, each half an ulp of the
// largest magnitude, doubled for the values beside a power of two. Half and bfloat16 round the result once more.
TEST(MinMaxUint8, RoundTripIsWithinHalfAStep) {
  at::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const double epsilon = dtype == at::kHalf ? 0x1p-11 : dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-23;
    for (const int64_t length : {1, 2, 31, 32, 33, 1000, 70001}) {
      for (const double magnitude : {1e-7, 1e-3, 1.0, 1e4}) {
        const double offset = magnitude == 1.0 ? -3 : magnitude == 1e4 ? 1 : 0;
        const auto input = ((at::randn({length}, at::kDouble) / 5 + offset) * magnitude).to(dtype);
        const auto exact = input.to(at::kDouble);
        const double span = (exact.max() - exact.min()).item<double>() + 1e-7;
        const double bound = span / 510 + 2 * epsilon * (exact.abs().max().item<double>() + span / 255);
        const double error = (roundTrip(input, 1).to(at::kDouble) - exact).abs().max().item<double>();
        EXPECT_LE(error, bound) << dtype << " length " << length << " magnitude " << magnitude;
      }
    }
  }
}

TEST(MinMaxUint8, DecodesAConstantChunkToItself) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const double constant : {1.0, -1.0, 1e-3, 6e-8, -1e-5, 65504.0, 0.0, -0.0, 12345.678, 1e-4}) {
      const auto input = at::full({50}, constant, at::TensorOptions().dtype(dtype));
      EXPECT_TRUE(at::equal(roundTrip(input, 3), input)) << dtype << ' ' << constant;
    }
  }
}

TEST(MinMaxUint8, DecodesANarrowRangeExactly) {
  const auto input = floats({1000.F, 1000.001F, 1000.002F});
  EXPECT_EQ(values(roundTrip(input, 1)), values(input));
  // Consecutive floats, of which up to 256 have a code each, so that they come back exactly.
  for (const int64_t count : {2, 3, 50, 100, 200}) {
    const auto ramp = at::arange(count, at::kFloat) * 0x1p-9F + 30000.F;
    EXPECT_TRUE(at::equal(roundTrip(ramp, 1), ramp)) << count;
    EXPECT_TRUE(at::equal(roundTrip(-ramp, 1), -ramp)) << count;
  }
  const auto doubles = at::arange(100, at::kDouble) * 0x1p-26 + 1e8;
  EXPECT_TRUE(at::equal(roundTrip(doubles, 1), doubles));
}

TEST(MinMaxUint8, NeverWrapsAtTheEdgeOfTheNarrowRange) {
  // Maxima whose level lies on either side of 2^24, where upper - 255 stops to be a float.
  for (int quarter = 0; quarter < 800; ++quarter) {
    const float high = 65700 + 0.25F * static_cast<float>(quarter);
    for (const float sign : {1.F, -1.F}) {
      const auto input = floats({sign * high, sign * (high - 0.5F), sign * (high - 1.F)});
      EXPECT_LE((roundTrip(input, 1) - input).abs().max().item<float>(), 1.F / 510 + 0x1p-7F) << sign * high;
    }
  }
}

void expectOnlyTheMiddleChunkIsNan(at::ScalarType dtype, int64_t length, int64_t position, float poison) {
  auto input = at::ones({3 * length}, at::TensorOptions().dtype(dtype));
  input[length + position] = poison;
  const auto output = roundTrip(input, 3).view({3, length});
  EXPECT_TRUE(output[1].isnan().all().item<bool>()) << dtype << ' ' << length << ' ' << position << ' ' << poison;
  EXPECT_TRUE((output[0] == 1).all().item<bool>());
  EXPECT_TRUE((output[2] == 1).all().item<bool>());
}

TEST(MinMaxUint8, DecodesAChunkWithANonFiniteValueToNan) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const int64_t length : {1, 7, 64, 300, 40000}) {
      for (const float poison : {kNan, -kNan, kInfinity, -kInfinity}) {
        expectOnlyTheMiddleChunkIsNan(dtype, length, 0, poison);
        expectOnlyTheMiddleChunkIsNan(dtype, length, length / 2, poison);
        expectOnlyTheMiddleChunkIsNan(dtype, length, length - 1, poison);
      }
    }
  }
}

TEST(MinMaxUint8, KeepsARangeBeyondTheLargestFloatFinite) {
  const auto input = floats({-kLargest, -1e38F, 0.F, 2e38F, kLargest});
  const auto output = roundTrip(input, 1);
  EXPECT_TRUE(output.isfinite().all().item<bool>());
  EXPECT_LE(((output - input) / kLargest).abs().max().item<float>(), 2.F / 510 * 1.001F);
  const auto halves = at::tensor({-65504.F, 65504.F, 65504.F}).to(at::kHalf);
  EXPECT_TRUE(roundTrip(halves, 1).isfinite().all().item<bool>());
  const auto doubles = at::tensor({-1.7e308, 0.0, 1.7e308}, at::kDouble);
  EXPECT_LE(((roundTrip(doubles, 1) - doubles) / 1.7e308).abs().max().item<double>(), 2.0 / 510 * 1.001);
}

TEST(MinMaxUint8, GivesTheSameBytesForEitherZero) {
  EXPECT_TRUE(at::equal(packed(floats({0.F, -0.F, 1.F}), 1), packed(floats({-0.F, 0.F, 1.F}), 1)));
  EXPECT_TRUE(at::equal(packed(at::full({9}, -0.0F), 1), packed(at::zeros({9}), 1)));
}

TEST(MinMaxUint8, DecodesADamagedHeaderWithoutTrustingIt) {
  auto bytes = packed(at::arange(64, at::kFloat), 1);
  bytes.slice(0, 0, 8).view(at::kFloat).copy_(floats({5.F, -5.F}));  // Not in order.
  EXPECT_TRUE(unpacked(bytes, 1, 64, at::kFloat).isnan().all().item<bool>());
  at::manual_seed(3);
  for (int i = 0; i < 200; ++i) {
    const auto noise = at::randint(0, 256, {96}, at::kByte);
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const auto output = unpacked(noise, 1, 64, dtype);
      EXPECT_TRUE((output.isnan().all() | output.isfinite().all()).item<bool>());
    }
  }
}

TEST(MinMaxUint8, AcceptsInputThatIsNotContiguous) {
  const auto input = at::randn({40, 30}).t();
  EXPECT_TRUE(at::equal(packed(input, 4), packed(input.contiguous(), 4)));
}

TEST(MinMaxUint8, DoesNotDependOnTheNumberOfThreads) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  at::manual_seed(2);
  const auto input = at::randn({300007});
  for (const int64_t chunks : {1, 2, 7, 1000}) {
    const auto alone = packed(input, chunks);
    const auto decoded = unpacked(alone, chunks, input.numel(), at::kFloat);
    const IntraOpThreads threads(5);
    EXPECT_TRUE(at::equal(packed(input, chunks), alone));
    EXPECT_TRUE(at::equal(unpacked(alone, chunks, input.numel(), at::kFloat), decoded));
  }
}

class ReduceAndCompress : public ::testing::TestWithParam<at::ScalarType> {};

// The partial sums and the tree of the original, in tensor operations.
at::Tensor originalSum(const std::vector<at::Tensor>& decoded) {
  const auto copies = static_cast<int64_t>(decoded.size());
  const size_t count = copies <= 4 ? 2 : copies <= 8 ? 4 : copies <= 16 ? 8 : copies <= 32 ? 16 : 32;
  const auto type = decoded[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> sums(count, at::zeros_like(decoded[0], type));
  for (size_t copy = 0; copy < decoded.size(); ++copy) {
    sums[copy % count] = sums[copy % count] + decoded[copy].to(type);
  }
  for (size_t half = count / 2; half > 0; half /= 2) {
    for (size_t part = 0; part < half; ++part) sums[part] = sums[part] + sums[part + half];
  }
  return sums[0];
}

TEST_P(ReduceAndCompress, EqualsDecodingAddingInTheOriginalsOrderAndCoding) {
  at::manual_seed(4);
  for (const int64_t copies : {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 70}) {
    for (const int64_t length : {0, 1, 17, 40, 20000}) {
      const int64_t stride = length == 40 ? 101 : std::max<int64_t>(length, 1);
      std::vector<at::Tensor> bytes;
      std::vector<at::Tensor> decoded;
      for (int64_t copy = 0; copy < copies; ++copy) {
        const auto input = (at::randn({length}) * 3).to(GetParam());
        auto one = at::zeros({packedChunkBytes(stride)}, at::kByte);
        const auto exact = packed(input, 1);
        one.slice(0, 0, exact.numel()).copy_(exact);
        decoded.push_back(roundTrip(input, 1));
        bytes.push_back(one);
      }
      auto result = at::full({packedChunkBytes(stride)}, 0xA5, at::kByte);
      reduceAndCompress(at::cat(bytes), copies, length, stride, GetParam(), static_cast<float>(copies), result);
      const auto mean = (originalSum(decoded) / static_cast<float>(copies)).to(GetParam());
      auto expected = at::zeros({packedChunkBytes(stride)}, at::kByte);
      const auto exact = packed(mean, 1);
      expected.slice(0, 0, exact.numel()).copy_(exact);
      EXPECT_TRUE(at::equal(result, expected)) << copies << " copies of " << length;
    }
  }
}

TEST_P(ReduceAndCompress, PassesANonFiniteCopyOn) {
  auto poisoned = at::ones({64}, at::TensorOptions().dtype(GetParam()));
  poisoned[5] = kInfinity;
  const auto healthy = packed(at::ones({64}, at::TensorOptions().dtype(GetParam())), 1);
  auto result = at::empty({packedChunkBytes(64)}, at::kByte);
  reduceAndCompress(at::cat({healthy, packed(poisoned, 1)}), 2, 64, 64, GetParam(), 2.F, result);
  EXPECT_TRUE(unpacked(result, 1, 64, GetParam()).isnan().all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ReduceAndCompress,
                         ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16));

template <class F>
std::string messageOf(const F& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no exception";
}

TEST(MinMaxUint8, NamesWhatIsWrongWithItsArguments) {
  auto bytes = at::empty({64}, at::kByte);
  auto output = at::empty({10});
  EXPECT_NE(messageOf([&] { compress(output, 0, bytes); }).find("at least one chunk, got 0"), std::string::npos);
  EXPECT_NE(messageOf([&] { compress(output, 2, bytes); }).find("into 128 bytes, got a packed tensor of 64"),
            std::string::npos);
  EXPECT_NE(messageOf([&] { compress(at::ones({4}, at::kInt), 1, bytes); }).find("got Int"), std::string::npos);
  auto wrongType = at::empty({64});
  EXPECT_NE(messageOf([&] { decompress(wrongType, 1, output); }).find("uint8, got Float"), std::string::npos);
  auto strided = at::empty({5, 4}).t();
  EXPECT_NE(messageOf([&] { decompress(bytes, 1, strided); }).find("contiguous output"), std::string::npos);
  EXPECT_NE(
      messageOf([&] { reduceAndCompress(bytes, 1, 33, 32, at::kFloat, 1.F, bytes); }).find("from 0 to 32, got 33"),
      std::string::npos);
  EXPECT_NE(messageOf([] { packedBytes(1, std::numeric_limits<int64_t>::max()); }).find("too many"), std::string::npos);
}

TEST(MinMaxUint8, RefusesSizesWhoseBytesCannotBeCounted) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  auto bytes = at::empty({64}, at::kByte);
  EXPECT_THROW(packedChunkBytes(kMost), c10::ValueError);
  EXPECT_THROW(packedChunkBytes(-1), c10::ValueError);
  EXPECT_THROW(packedBytes(kMost, 1), c10::ValueError);
  EXPECT_THROW(reduceAndCompress(bytes, 1, 1, kMost, at::kFloat, 1.F, bytes), c10::ValueError);
  EXPECT_THROW(reduceAndCompress(bytes, kMost, 1, 32, at::kFloat, 1.F, bytes), c10::ValueError);
}

}  // namespace
}  // namespace bagua::minmax_uint8
