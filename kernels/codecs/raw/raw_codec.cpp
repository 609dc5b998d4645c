// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/raw/raw_codec.h"

#include <c10/util/Exception.h>

#if BAGUA_WITH_CUDA
#include "kernels/codecs/raw/raw_cuda_codec.h"
#endif

namespace bagua {
namespace {

class RawCodec final : public Codec {
 public:
  RawCodec(at::ScalarType dtype, std::shared_ptr<const Codec> onCuda)
      : elementBytes_(static_cast<int64_t>(c10::elementSize(dtype))), onCuda_(std::move(onCuda)) {}

  [[nodiscard]] PackedLayout layout() const override { return {.groupElements = 1, .groupBytes = elementBytes_}; }

  void start(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed) const override {
    TORCH_INTERNAL_ASSERT(!encoding.hasFeedback());
    if (packed.is_cuda()) return onCuda_->start(values, encoding, packed);
    const int64_t used = layout().packedBytes(values.numel());
    packed.narrow(0, used, packed.numel() - used).zero_();
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda_->encode(values, piece, encoding, packed);
    bytesOf(packed, piece).copy_(elements(values, piece).view(at::kByte));
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    if (values.is_cuda()) return onCuda_->decode(packed, piece, values);
    elements(values, piece).view(at::kByte).copy_(bytesOf(packed, piece));
  }

  void decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const override {
    // A copy: in a message the bytes need not be aligned to the type.
    sums.add_(bytesOf(packed, piece).clone().view(dtype));
  }

  void decodeMean(const at::Tensor& copies, const Piece& piece, double divisor, const Encoding& encoding,
                  at::Tensor& mean, at::Tensor& packed) const override {
    if (mean.is_cuda()) return onCuda_->decodeMean(copies, piece, divisor, encoding, mean, packed);
    Codec::decodeMean(copies, piece, divisor, encoding, mean, packed);
  }

  void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                    at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda_->encodeChunks(values, chunkLength, encoding, packed);
    Codec::encodeChunks(values, chunkLength, encoding, packed);
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    if (values.is_cuda()) return onCuda_->decodeChunks(packed, chunkLength, values);
    Codec::decodeChunks(packed, chunkLength, values);
  }

 private:
  static at::Tensor elements(const at::Tensor& values, const Piece& piece) {
    return values.narrow(0, piece.begin, piece.end - piece.begin);
  }
  [[nodiscard]] at::Tensor bytesOf(const at::Tensor& packed, const Piece& piece) const {
    return packed.narrow(0, piece.begin * elementBytes_, (piece.end - piece.begin) * elementBytes_);
  }

  const int64_t elementBytes_;
  const std::shared_ptr<const Codec> onCuda_;
};

}  // namespace

std::shared_ptr<const Codec> rawCodec(at::ScalarType dtype) {
#if BAGUA_WITH_CUDA
  return std::make_shared<RawCodec>(dtype, std::make_shared<raw::CudaCodec>(dtype, cudaDevice()));
#else
  return std::make_shared<RawCodec>(dtype, nullptr);
#endif
}

}  // namespace bagua
