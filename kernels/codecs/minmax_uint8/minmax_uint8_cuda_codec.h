// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/codec.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/cuda_device.h"
#include "kernels/tensor_elements.h"

namespace bagua::minmax_uint8::cuda {

// The codec on the tensors of a CUDA device, in two launches for coding any number of rows and one for all else. A mean
// is coded by its ranges, which the launch that made it has found.
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

  void decodeMean(const at::Tensor& copies, const Piece& /*piece*/, double divisor, const Encoding& encoding,
                  at::Tensor& mean, at::Tensor& /*packed*/) const override {
    launch(mean, [&](auto element, cudaStream_t stream) {
      const Cut cut = cutOf(mean, mean.numel(), 1);
      launchMean<decltype(element)>(copies, divisor, encoding, mean, workspaceFor<decltype(element)>(mean, cut),
                                    stream);
    });
  }

  void decodeMeanAndEncode(const at::Tensor& copies, double divisor, const Encoding& encoding, at::Tensor& mean,
                           at::Tensor& packed) const override {
    launch(mean, [&](auto element, cudaStream_t stream) {
      using Element = decltype(element);
      const Cut cut = cutOf(mean, mean.numel(), 1);
      const at::Tensor workspace = workspaceFor<Element>(mean, cut);
      launchMean<Element>(copies, divisor, encoding, mean, workspace, stream);
      launchEncode<Element>(mean, cut, encoding, workspace, packed.unsqueeze(0), stream);
    });
  }

  void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                    at::Tensor& packed) const override {
    if (packed.size(0) == 0) return;
    launch(values, [&](auto element, cudaStream_t stream) {
      using Element = decltype(element);
      const Cut cut = cutOf(values, chunkLength, packed.size(0));
      const at::Tensor workspace = workspaceFor<Element>(values, cut);
      device_.check(
          cuda::findRanges(dataOf<Element>(values), feedbackOf(encoding), cut, workspace.mutable_data_ptr(), stream));
      launchEncode<Element>(values, cut, encoding, workspace, packed, stream);
    });
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    launch(values, [&](auto element, cudaStream_t stream) {
      using Element = decltype(element);
      device_.check(cuda::decode(rowsOf<const uint8_t>(packed), cutOf(values, chunkLength, packed.size(0)),
                                 mutableDataOf<Element>(values), stream));
    });
  }

 private:
  static Cut cutOf(const at::Tensor& values, int64_t chunkLength, int64_t chunks) {
    return {values.numel(), chunks, chunkLength};
  }

  static Feedback feedbackOf(const Encoding& encoding) {
    if (!encoding.hasFeedback()) return {};
    return {mutableDataOf<float>(encoding.residual), mutableDataOf<float>(encoding.nextResidual),
            encoding.wasLost.defined() ? dataOf<bool>(encoding.wasLost) : nullptr};
  }

  // From ATen's allocator before the launch, on the current stream, which makes it safe under graph capture too.
  template <class Element>
  static at::Tensor workspaceFor(const at::Tensor& like, const Cut& cut) {
    return at::empty({workspaceBytes<Element>(cut)}, like.options().dtype(at::kByte));
  }

  template <class Launch>
  void launch(const at::Tensor& values, const Launch& kernels) const {
    const c10::DeviceGuard guard(values.device());
    withElement(values.scalar_type(), "codec minmax_uint8",
                [&](auto element) { kernels(element, device_.launchOn(values).stream); });
  }

  template <class Element>
  void launchMean(const at::Tensor& copies, double divisor, const Encoding& encoding, const at::Tensor& mean,
                  const at::Tensor& workspace, cudaStream_t stream) const {
    const Copies all = {rowsOf<const uint8_t>(copies), copies.size(0), divisor};
    device_.check(cuda::mean(all, feedbackOf(encoding), mean.numel(), mutableDataOf<Element>(mean),
                             workspace.mutable_data_ptr(), stream));
  }

  template <class Element>
  void launchEncode(const at::Tensor& values, const Cut& cut, const Encoding& encoding, const at::Tensor& workspace,
                    const at::Tensor& packed, cudaStream_t stream) const {
    device_.check(cuda::encode(dataOf<Element>(values), feedbackOf(encoding), cut, workspace.const_data_ptr(),
                               rowsOf<uint8_t>(packed), stream));
  }

  const PackedLayout layout_;
  const CudaDevice& device_;
};

}  // namespace bagua::minmax_uint8::cuda
