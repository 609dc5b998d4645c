// SPDX-License-Identifier: Apache-2.0
// What every registered codec promises on CUDA: what it does on the CPU. tests/gpu/test_gpu_codecs.py runs these where
// there is a GPU.
#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include "tests/contract/codec_contract.h"

namespace bagua {
namespace {

class CodecCudaContract : public CodecContract {
 protected:
  void SetUp() override {
    CodecContract::SetUp();
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  }

  [[nodiscard]] static at::Tensor toCuda(const at::Tensor& tensor) { return tensor.to(at::kCUDA); }

  // What a call leaves behind on each device: `f(to)` makes its tensors with to(), and returns what to compare.
  template <class F>
  static void expectTheSame(const F& f) {
    const auto onCpu = f([](const at::Tensor& tensor) { return tensor.clone(); });
    const auto onCuda = f(toCuda);
    for (size_t i = 0; i < onCpu.size(); ++i) ASSERT_TRUE(sameBits(onCpu[i], onCuda[i].cpu())) << "result " << i;
  }
};

using Tensors = std::vector<at::Tensor>;

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecCudaContract, ::testing::ValuesIn(CodecRegistry::names()),
                         [](const auto& it) { return it.param; });

TEST_P(CodecCudaContract, CodesAndDecodesLikeTheCpu) {
  forValues([](const at::Tensor& values) {
    const Residuals before = residualsFor(values);
    for (const bool hasFeedback : {false, true}) {
      for (const int64_t extra : {0, 5, 64}) {
        expectTheSame([&](const auto& to) -> Tensors {
          const at::Tensor x = to(values);
          const at::Tensor residual = to(before.residual);
          const Encoding encoding = hasFeedback ? Encoding{.residual = residual, .nextResidual = residual} : Encoding{};
          at::Tensor packed = to(packedFor(values.numel(), extra));
          codec().start(x, encoding, packed);
          codec().encode(x, {0, values.numel()}, encoding, packed);
          at::Tensor decoded = to(values);
          codec().decode(packed, {0, values.numel()}, decoded);
          at::Tensor sums = to(values.to(computeType(values.scalar_type())));
          codec().decodeAdd(packed, {0, values.numel()}, values.scalar_type(), sums);
          return {packed, residual, decoded, sums};
        });
        if (HasFatalFailure()) return;
      }
    }
  });
}

TEST_P(CodecCudaContract, CodesManyChunksLikeTheCpu) {
  forValues([](const at::Tensor& values) {
    const int64_t chunkLength = values.numel() / 3 + 2;
    const Residuals before = residualsFor(values);
    for (const bool hasFeedback : {false, true}) {
      expectTheSame([&](const auto& to) -> Tensors {
        const at::Tensor residual = to(before.residual);
        const Encoding encoding = hasFeedback ? Encoding{.residual = residual, .nextResidual = residual} : Encoding{};
        at::Tensor packed = to(packedFor(chunkLength).repeat({4, 1}));
        codec().encodeChunks(to(values), chunkLength, encoding, packed);
        at::Tensor decoded = to(values);
        codec().decodeChunks(packed, chunkLength, decoded);
        return {packed, residual, decoded};
      });
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(CodecCudaContract, MakesTheMeansOfTheCpu) {
  forValues([](const at::Tensor& values) {
    const Residuals before = residualsFor(values);
    const at::Tensor rows = at::stack({encoded(values), encoded(values * 2), encoded(-values)});
    for (const bool hasFeedback : {false, true}) {
      for (const int64_t extra : {0, 5, 64}) {
        for (const bool isAtOnce : {false, true}) {
          expectTheSame([&](const auto& to) -> Tensors {
            const at::Tensor residual = to(before.residual);
            const Encoding encoding =
                hasFeedback ? Encoding{.residual = residual, .nextResidual = residual} : Encoding{};
            at::Tensor mean = to(values);
            at::Tensor packed = to(packedFor(values.numel(), extra));
            if (isAtOnce) {
              codec().decodeMeanAndEncode(to(rows), 3, encoding, mean, packed);
            } else {
              codec().decodeMean(to(rows), {0, values.numel()}, 3, encoding, mean, packed);
              codec().encode(mean, {0, values.numel()}, encoding, packed);
            }
            return {mean, packed, residual};
          });
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

}  // namespace
}  // namespace bagua
