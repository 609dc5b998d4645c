// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/codec.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/cuda_device.h"
#include "kernels/tensor_elements.h"

namespace bagua::minmax_uint8::cuda {

// The codec on the tensors of a CUDA device, a launch for each call.
class CudaCodec final : public Codec {
 public:
  CudaCodec(const PackedLayout& layout, const CudaDevice& device) : layout_(layout), device_(device) {}

  [[nodiscard]] PackedLayout layout() const override { return layout_; }

  // encode() does it all.
  void start(const at::Tensor& /*values*/, const Encoding& /*encoding*/, at::Tensor& /*packed*/) const override {}

  void encode(const at::Tensor& values, const Piece& /*piece*/, const Encoding& encoding,
              at::Tensor& packed) const override {
    at::Tensor row = packed.unsqueeze(0);
    encodeChunks(values, values.numel(), encoding, row);
  }

  void decode(const at::Tensor& packed, const Piece& /*piece*/, at::Tensor& values) const override {
    decodeChunks(packed.unsqueeze(0), values.numel(), values);
  }

  void decodeMean(const at::Tensor& copies, const Piece& /*piece*/, double divisor, const Encoding& /*encoding*/,
                  at::Tensor& mean, at::Tensor& /*packed*/) const override {
    launch(mean, [&](auto element, const CudaLaunch& launch) {
      return cuda::mean(rowsOf<const uint8_t>(copies), copies.size(0), mean.numel(), divisor,
                        mutableDataOf<decltype(element)>(mean), launch);
    });
  }

  void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                    at::Tensor& packed) const override {
    launch(values, [&](auto element, const CudaLaunch& launch) {
      return cuda::encode(dataOf<decltype(element)>(values), feedbackOf(encoding),
                          {values.numel(), packed.size(0), chunkLength}, rowsOf<uint8_t>(packed), launch);
    });
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    launch(values, [&](auto element, const CudaLaunch& launch) {
      return cuda::decode(rowsOf<const uint8_t>(packed), {values.numel(), packed.size(0), chunkLength},
                          mutableDataOf<decltype(element)>(values), launch);
    });
  }

 private:
  static Feedback feedbackOf(const Encoding& encoding) {
    if (!encoding.hasFeedback()) return {};
    return {mutableDataOf<float>(encoding.residual), mutableDataOf<float>(encoding.nextResidual),
            encoding.wasLost.defined() ? dataOf<bool>(encoding.wasLost) : nullptr};
  }

  template <class Launch>
  void launch(const at::Tensor& values, const Launch& kernels) const {
    const c10::DeviceGuard guard(values.device());
    withElement(values.scalar_type(), "codec minmax_uint8",
                [&](auto element) { device_.check(kernels(element, device_.launchOn(values))); });
  }

  const PackedLayout layout_;
  const CudaDevice& device_;
};

}  // namespace bagua::minmax_uint8::cuda
