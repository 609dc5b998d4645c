// SPDX-License-Identifier: Apache-2.0
// A codec for the tests of the collectives: float16, in groups and packets whose sizes fit nothing, with feedback.
#include <ATen/ops/empty.h>

#include <cstring>

#include "kernels/codec.h"

namespace bagua {
namespace {

class HalvesCodec final : public Codec {
 public:
  [[nodiscard]] PackedLayout layout() const override {
    return {.headerBytes = 7, .groupElements = 5, .groupBytes = 11, .alignment = 3};
  }

  void start(const at::Tensor& /*values*/, const Encoding& /*encoding*/, at::Tensor& packed) const override {
    packed.zero_();
    packed[0] = 77;
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    encoding.restoreIfLost(piece);
    at::Tensor exact = within(values, piece).to(at::kFloat, false, true);
    if (encoding.hasFeedback()) exact.add_(within(encoding.residual, piece));
    const at::Tensor halves = exact.to(at::kHalf);
    if (encoding.hasFeedback()) within(encoding.nextResidual, piece).copy_(exact.sub_(halves));
    auto* const bytes = packed.mutable_data_ptr<uint8_t>();
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      std::memcpy(bytes + placeOf(i), halves.const_data_ptr<c10::Half>() + (i - piece.begin), 2);
    }
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    within(values, piece).copy_(decoded(packed, piece));
  }

 private:
  static at::Tensor within(const at::Tensor& values, const Piece& piece) {
    return values.narrow(0, piece.begin, piece.end - piece.begin);
  }
  static int64_t placeOf(int64_t element) { return 7 + element / 5 * 11 + element % 5 * 2; }

  static at::Tensor decoded(const at::Tensor& packed, const Piece& piece) {
    TORCH_CHECK(packed.const_data_ptr<uint8_t>()[0] == 77, "a piece without a header");
    at::Tensor halves = at::empty({piece.end - piece.begin}, at::kHalf);
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      std::memcpy(halves.mutable_data_ptr<c10::Half>() + (i - piece.begin),
                  packed.const_data_ptr<uint8_t>() + placeOf(i), 2);
    }
    return halves;
  }
};

}  // namespace
}  // namespace bagua

BAGUA_REGISTER_CODEC({
    .name = "halves",
    .summary = "float16, for tests",
    .codec = std::make_shared<bagua::HalvesCodec>(),
})
