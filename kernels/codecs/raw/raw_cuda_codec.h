// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/codec.h"
#include "kernels/codecs/raw/raw_cuda.h"
#include "kernels/tensor_elements.h"

namespace bagua::raw {

// Values as they are on a CUDA device. A call is one launch, however many rows there are.
class CudaCodec final : public Codec {
 public:
  CudaCodec(at::ScalarType dtype, const CudaDevice& device)
      : elementBytes_(static_cast<int64_t>(c10::elementSize(dtype))), device_(device) {}

  [[nodiscard]] PackedLayout layout() const override { return {.groupElements = 1, .groupBytes = elementBytes_}; }

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
    const c10::DeviceGuard guard(mean.device());
    withElement(mean.scalar_type(), "what stays exact", [&](auto element) {
      using Element = decltype(element);
      using T = ElementTraits<Element>::Compute;
      device_.check(meanOfRows<Element>(rowsOf<const uint8_t>(copies), copies.size(0), mean.numel(),
                                        static_cast<T>(divisor), mutableDataOf<Element>(mean), device_.launchOn(mean)));
    });
  }

  void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& /*encoding*/,
                    at::Tensor& packed) const override {
    const c10::DeviceGuard guard(values.device());
    device_.check(writeRows(dataOf<uint8_t>(values), cutInBytes(values, chunkLength, packed), rowsOf<uint8_t>(packed),
                            device_.launchOn(values)));
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    const c10::DeviceGuard guard(values.device());
    device_.check(readRows(rowsOf<const uint8_t>(packed), cutInBytes(values, chunkLength, packed),
                           mutableDataOf<uint8_t>(values), device_.launchOn(values)));
  }

 private:
  [[nodiscard]] Cut cutInBytes(const at::Tensor& values, int64_t chunkLength, const at::Tensor& packed) const {
    return {values.numel() * elementBytes_, packed.size(0), chunkLength * elementBytes_};
  }

  const int64_t elementBytes_;
  const CudaDevice& device_;
};

}  // namespace bagua::raw
