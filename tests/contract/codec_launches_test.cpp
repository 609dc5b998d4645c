// SPDX-License-Identifier: Apache-2.0
// How many kernels a codec launches on CUDA. kernels/README.md has these numbers.
#include <cstdint>

#include "kernels/codecs/raw/raw_codec.h"
#include "kernels/integers.h"
#include "tests/contract/codec_contract.h"
#include "tests/support/cuda_on_cpu/codecs_on_cpu.h"
#include "tests/support/cuda_on_cpu/grid.h"

namespace bagua {
namespace {

class CodecLaunches : public CodecContract {
 protected:
  template <class F>
  [[nodiscard]] static int64_t launchesOf(const F& f) {
    const int64_t before = cuda_on_cpu::device().launches;
    f();
    return cuda_on_cpu::device().launches - before;
  }

  static void expectFewFor(int64_t hosts, const Encoding& encoding) {
    SCOPED_TRACE(hosts);
    const Codec& onCpu = cuda_on_cpu::codec(GetParam());
    at::Tensor values = at::randn({kNumel});
    const int64_t chunkLength = ceilDivide(kNumel, hosts);
    at::Tensor rows = packedFor(chunkLength).repeat({hosts, 1});
    EXPECT_EQ(launchesOf([&] { onCpu.encodeChunks(values, chunkLength, encoding, rows); }), 1);
    EXPECT_EQ(launchesOf([&] { onCpu.decodeChunks(rows, chunkLength, values); }), 1);
    at::Tensor mean = at::empty({chunkLength});
    at::Tensor packed = packedFor(chunkLength);
    const Encoding ofMean = encoding.narrow(0, chunkLength);
    EXPECT_EQ(launchesOf([&] { onCpu.decodeMean(rows, {0, chunkLength}, 2, ofMean, mean, packed); }), 1);
    EXPECT_EQ(launchesOf([&] { onCpu.decodeMeanAndEncode(rows, 2, ofMean, mean, packed); }), 2);
  }

  static constexpr int64_t kNumel = 1001;
};

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecLaunches, ::testing::ValuesIn(codecsOn(at::kCUDA)),
                         [](const auto& it) { return it.param; });

TEST_P(CodecLaunches, AreAsManyForAnyNumberOfHosts) {
  const Encoding afterALostStep{
      .residual = at::zeros({kNumel}), .nextResidual = at::zeros({kNumel}), .wasLost = at::ones({}, at::kBool)};
  for (const int64_t hosts : {2, 7, 40}) {
    expectFewFor(hosts, {});
    expectFewFor(hosts, afterALostStep);
  }
}

// Exact values travel in the messages of others: one launch for each way, and the bytes and means of the CPU.
TEST(RawCodecLaunches, AreAsManyForAnyNumberOfHosts) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto raw = rawCodec(dtype);
    const auto launched = cuda_on_cpu::rawCodec(dtype);
    const int64_t bytes = raw->layout().groupBytes;
    for (const int64_t hosts : {2, 7, 40}) {
      SCOPED_TRACE(c10::str(hosts, " hosts of ", dtype));
      constexpr int64_t kLength = 103;
      const int64_t chunkLength = ceilDivide(kLength, hosts);
      const at::Tensor values = at::randn({kLength}).to(dtype);
      // Rows of an odd number of bytes, so that most are not aligned to the type.
      const int64_t rowBytes = chunkLength * bytes + 5;
      at::Tensor rows = at::full({hosts, rowBytes}, 7, at::kByte);
      at::Tensor expectedRows = rows.clone();
      const auto before = cuda_on_cpu::device().launches;
      launched->encodeChunks(values, chunkLength, {}, rows);
      raw->encodeChunks(values, chunkLength, {}, expectedRows);
      EXPECT_TRUE(at::equal(rows, expectedRows));

      at::Tensor decoded = at::zeros_like(values);
      launched->decodeChunks(rows, chunkLength, decoded);
      EXPECT_TRUE(at::equal(decoded, values));

      at::Tensor copies = at::empty({hosts, rowBytes}, at::kByte);
      for (int64_t copy = 0; copy < hosts; ++copy) {
        at::Tensor row = copies[copy];
        raw->start(at::empty({chunkLength}, dtype), {}, row);
        const at::Tensor own = at::randn({chunkLength}).to(dtype);
        raw->encode(own, {0, chunkLength}, {}, row);
      }
      at::Tensor mean = at::empty({chunkLength}, dtype);
      at::Tensor expectedMean = mean.clone();
      at::Tensor packed = at::empty({rowBytes}, at::kByte);
      at::Tensor expectedPacked = packed.clone();
      launched->decodeMeanAndEncode(copies, 3, {}, mean, packed);
      raw->decodeMeanAndEncode(copies, 3, {}, expectedMean, expectedPacked);
      EXPECT_TRUE(at::equal(mean, expectedMean));
      EXPECT_TRUE(at::equal(packed, expectedPacked));
      EXPECT_EQ(cuda_on_cpu::device().launches - before, 4);
    }
  }
}

}  // namespace
}  // namespace bagua
