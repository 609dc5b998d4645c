// SPDX-License-Identifier: Apache-2.0
// How many kernels a codec launches on CUDA. kernels/README.md has these numbers.
#include <cstdint>

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

}  // namespace
}  // namespace bagua
