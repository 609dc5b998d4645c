// SPDX-License-Identifier: Apache-2.0
// What every registered codec promises on CUDA: what it does on the CPU. tests/gpu/test_gpu_sanitizer.py runs these
// where there is a GPU.
#include <ATen/Context.h>

#include "tests/contract/codec_device_contract.h"

namespace bagua {
namespace {

class CodecCudaContract : public CodecDeviceContract {
 protected:
  void SetUp() override {
    CodecDeviceContract::SetUp();
    if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  }

  [[nodiscard]] static Side cuda() {
    return {codec(), [](const at::Tensor& tensor) { return tensor.to(at::kCUDA); }};
  }
};

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecCudaContract, ::testing::ValuesIn(codecsOn(at::kCUDA)),
                         [](const auto& it) { return it.param; });

TEST_P(CodecCudaContract, CodesAndDecodesLikeTheCpu) { codesAndDecodesLikeTheCpu(cuda()); }

TEST_P(CodecCudaContract, CodesManyChunksLikeTheCpu) { codesManyChunksLikeTheCpu(cuda()); }

TEST_P(CodecCudaContract, MakesTheMeansOfTheCpu) { makesTheMeansOfTheCpu(cuda()); }

}  // namespace
}  // namespace bagua
