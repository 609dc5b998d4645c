// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/raw_codec.h"

#include <c10/util/Exception.h>

namespace bagua::compressed {
namespace {

class RawCodec final : public Codec {
 public:
  explicit RawCodec(at::ScalarType dtype) : elementBytes_(static_cast<int64_t>(c10::elementSize(dtype))) {}

  [[nodiscard]] PackedLayout layout() const override { return {.groupElements = 1, .groupBytes = elementBytes_}; }

  void start(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed) const override {
    TORCH_INTERNAL_ASSERT(!encoding.hasFeedback());
    const int64_t used = layout().packedBytes(values.numel());
    packed.narrow(0, used, packed.numel() - used).zero_();
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& /*encoding*/,
              at::Tensor& packed) const override {
    bytesOf(packed, piece).copy_(elements(values, piece).view(at::kByte));
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    elements(values, piece).view(at::kByte).copy_(bytesOf(packed, piece));
  }

  void decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const override {
    // A copy: in a message the bytes need not be aligned to the type.
    sums.add_(bytesOf(packed, piece).clone().view(dtype));
  }

 private:
  static at::Tensor elements(const at::Tensor& values, const Piece& piece) {
    return values.narrow(0, piece.begin, piece.end - piece.begin);
  }
  [[nodiscard]] at::Tensor bytesOf(const at::Tensor& packed, const Piece& piece) const {
    return packed.narrow(0, piece.begin * elementBytes_, (piece.end - piece.begin) * elementBytes_);
  }

  const int64_t elementBytes_;
};

}  // namespace

std::shared_ptr<const Codec> rawCodec(at::ScalarType dtype) { return std::make_shared<RawCodec>(dtype); }

}  // namespace bagua::compressed
