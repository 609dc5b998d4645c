// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/codec.h"
#include "kernels/codecs/block_scaled/block_scaled_cuda.h"
#include "kernels/codecs/block_scaled/block_scaled_source_of.h"
#include "kernels/tensor_elements.h"

namespace bagua::block_scaled::cuda {

// A block codec on the tensors of a CUDA device. A call is one launch, however many rows there are.
class CudaCodec final : public Codec {
 public:
  CudaCodec(const PackedLayout& layout, const FormatKernels& kernels, const CudaDevice& device)
      : layout_(layout), kernels_(kernels), device_(device) {}

  [[nodiscard]] PackedLayout layout() const override { return layout_; }
  [[nodiscard]] bool canRoundStochastically() const override { return true; }
  // Rotated formats have a header, which holds the key.
  [[nodiscard]] bool usesKey(Rounding rounding) const override {
    return layout_.headerBytes > 0 || rounding == Rounding::kStochastic;
  }

  // encode() does it all.
  void start(const at::Tensor& /*values*/, const Encoding& /*encoding*/, at::Tensor& /*packed*/) const override {}

  void encode(const at::Tensor& values, const Piece& /*piece*/, const Encoding& encoding,
              at::Tensor& packed) const override {
    encodeRows(values, {values.numel(), 1, values.numel()}, encoding, false, packed.unsqueeze(0));
  }

  void decode(const at::Tensor& packed, const Piece& /*piece*/, at::Tensor& values) const override {
    decodeChunks(packed.unsqueeze(0), values.numel(), values);
  }

  void decodeMean(const at::Tensor& copies, const Piece& /*piece*/, double divisor, const Encoding& /*encoding*/,
                  at::Tensor& mean, at::Tensor& /*packed*/) const override {
    launch(mean, [&](auto element, const CudaLaunch& on) {
      using Element = decltype(element);
      using T = ElementTraits<Element>::Compute;
      return kernels_.of<Element>().mean(rowsOf<const uint8_t>(copies), copies.size(0), mean.numel(),
                                         static_cast<T>(divisor), mutableDataOf<Element>(mean), on);
    });
  }

  void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                    at::Tensor& packed) const override {
    encodeRows(values, {values.numel(), packed.size(0), chunkLength}, encoding, true, packed);
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    launch(values, [&](auto element, const CudaLaunch& on) {
      using Element = decltype(element);
      return kernels_.of<Element>().decode(rowsOf<const uint8_t>(packed), {values.numel(), packed.size(0), chunkLength},
                                           mutableDataOf<Element>(values), on);
    });
  }

 private:
  template <class Launch>
  void launch(const at::Tensor& values, const Launch& kernel) const {
    const c10::DeviceGuard guard(values.device());
    withElement(values.scalar_type(), "a block codec",
                [&](auto element) { device_.check(kernel(element, device_.launchOn(values))); });
  }

  void encodeRows(const at::Tensor& values, const Cut& cut, const Encoding& encoding, bool areParts,
                  const at::Tensor& packed) const {
    launch(values, [&](auto element, const CudaLaunch& on) {
      using Element = decltype(element);
      return kernels_.of<Element>().encode(sourceOf<Element>(values, encoding), areParts, cut, rowsOf<uint8_t>(packed),
                                           on);
    });
  }

  const PackedLayout layout_;
  const FormatKernels& kernels_;
  const CudaDevice& device_;
};

}  // namespace bagua::block_scaled::cuda
