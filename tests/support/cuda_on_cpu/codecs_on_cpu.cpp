// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_on_cpu/codecs_on_cpu.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <map>
#include <memory>

#include "kernels/tensor_elements.h"
#include "tests/support/cuda_on_cpu/grid.h"

// libbagua may have classes of the same names, with nvcc's kernels.
#pragma GCC visibility push(hidden)
#include "kernels/codecs/block_scaled/block_scaled_cuda_codec.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda_codec.h"
#include "kernels/codecs/raw/raw_cuda_codec.h"
#pragma GCC visibility pop

namespace cuda_on_cpu {
namespace {

using bagua::block_scaled::cuda::kernelsOf;

constexpr bagua::CudaDevice kHost = {
    .launchOn = [](const at::Tensor& /*tensor*/) -> bagua::CudaLaunch {
      return {nullptr, device().multiprocessors};
    },
    .check = [](cudaError_t error) { TORCH_CHECK(error == cudaSuccess, "a launch failed with error ", error); }};

const std::map<std::string, const bagua::block_scaled::cuda::FormatKernels& (*)()> kBlockCodecs = {
    {"int8", kernelsOf<bagua::block_scaled::EightBits>},
    {"4bit", kernelsOf<bagua::block_scaled::FourBits>},
    {"2bit", kernelsOf<bagua::block_scaled::TwoBits>},
    {"1bit", kernelsOf<bagua::block_scaled::OneBit>},
};

std::shared_ptr<const bagua::Codec> make(const std::string& name) {
  const bagua::PackedLayout layout = bagua::CodecRegistry::find(name).codec->layout();
  if (name == "minmax_uint8") return std::make_shared<bagua::minmax_uint8::cuda::CudaCodec>(layout, kHost);
  const auto kernels = kBlockCodecs.find(name);
  TORCH_CHECK(kernels != kBlockCodecs.end(), "what codec ", name, " is on CUDA has to be named here");
  return std::make_shared<bagua::block_scaled::cuda::CudaCodec>(layout, kernels->second(), kHost);
}

}  // namespace

const bagua::Codec& codec(const std::string& name) {
  static std::map<std::string, std::shared_ptr<const bagua::Codec>> all;
  auto& known = all[name];
  if (known == nullptr) known = make(name);
  return *known;
}

std::shared_ptr<const bagua::Codec> rawCodec(at::ScalarType dtype) {
  return std::make_shared<bagua::raw::CudaCodec>(dtype, kHost);
}

}  // namespace cuda_on_cpu
