// SPDX-License-Identifier: Apache-2.0
// A codec for the contract tests, as short as a complete one can be: every number becomes a bfloat16. Others have no
// group of one element, no alignment and no devices but all. kernels/codec.h and the headers below are all it knows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "kernels/codec.h"
#include "kernels/integers.h"
#include "kernels/share_out.h"
#include "kernels/tensor_elements.h"

namespace bagua {
namespace {

using Code = ElementTraits<BFloat16Bits>;

constexpr const char* kWhat = "codec shortest_for_tests";
// A thread takes so many elements at a time.
constexpr int64_t kGrain = 4096;

template <class Compute>
BFloat16Bits codeOf(Compute value, const Encoding& encoding, int64_t element) {
  if (!std::isfinite(value)) return Code::nan();
  const auto x = static_cast<float>(std::clamp<Compute>(value, -Code::kMaxFinite, Code::kMaxFinite));
  if (encoding.rounding == Rounding::kNearest) return Code::store(x);
  // What is cut off, plus as many random bits, carries as often as it is large.
  const auto random = static_cast<uint32_t>(keyOfPart(encoding.key, element) & 0xFFFFU);
  return {static_cast<uint16_t>((bitCast<uint32_t>(x) + random) >> 16U)};
}

template <class Element>
Element valueOf(BFloat16Bits code) {
  using Traits = ElementTraits<Element>;
  const typename Traits::Compute value = Code::load(code);
  return std::isfinite(value) ? Traits::store(std::clamp(value, -Traits::kMaxFinite, Traits::kMaxFinite))
                              : Traits::nan();
}

template <class Compute>
float residualOf(Compute rest) {
  constexpr Compute kMax = ElementTraits<float>::kMaxFinite;
  return static_cast<float>(std::clamp(rest, -kMax, kMax));
}

class ShortestCodec final : public Codec {
 public:
  [[nodiscard]] PackedLayout layout() const override {
    return {.headerBytes = 4, .groupElements = 1, .groupBytes = sizeof(BFloat16Bits), .alignment = 16};
  }
  [[nodiscard]] bool canRoundStochastically() const override { return true; }

  void start(const at::Tensor& values, const Encoding& /*encoding*/, at::Tensor& packed) const override {
    auto* bytes = mutableDataOf<uint8_t>(packed);
    const int64_t end = offsetOf(values.numel());
    std::memset(bytes, 0, static_cast<size_t>(offsetOf(0)));
    std::memset(bytes + end, 0, static_cast<size_t>(packed.numel() - end));
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    encoding.restoreIfLost(piece);
    const auto* residual = encoding.hasFeedback() ? dataOf<float>(encoding.residual) : nullptr;
    auto* next = encoding.hasFeedback() ? mutableDataOf<float>(encoding.nextResidual) : nullptr;
    auto* bytes = mutableDataOf<uint8_t>(packed);
    forElements(values.scalar_type(), piece, [&](auto element, int64_t i) {
      using Traits = ElementTraits<decltype(element)>;
      typename Traits::Compute h = Traits::load(dataOf<decltype(element)>(values)[i]);
      if (residual != nullptr) h += residual[i];
      const BFloat16Bits code = codeOf(h, encoding, i);
      std::memcpy(bytes + offsetOf(i), &code, sizeof(code));
      if (next == nullptr) return;
      next[i] = std::isfinite(h) ? residualOf(h - Traits::load(valueOf<decltype(element)>(code))) : residual[i];
    });
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    forElements(values.scalar_type(), piece, [&](auto element, int64_t i) {
      BFloat16Bits code;
      std::memcpy(&code, dataOf<uint8_t>(packed) + offsetOf(i), sizeof(code));
      mutableDataOf<decltype(element)>(values)[i] = valueOf<decltype(element)>(code);
    });
  }

 private:
  [[nodiscard]] int64_t offsetOf(int64_t element) const { return layout().headerBytes + element * layout().groupBytes; }

  template <class F>
  static void forElements(at::ScalarType dtype, const Piece& piece, const F& f) {
    withElement(dtype, kWhat, [&](auto element) {
      shareOut(piece.end - piece.begin, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) f(element, piece.begin + i);
      });
    });
  }
};

}  // namespace
}  // namespace bagua

BAGUA_REGISTER_CODEC({
    .name = "shortest_for_tests",
    .summary = "two bytes per element",
    .codec = std::make_shared<bagua::ShortestCodec>(),
    .devices = {at::kCPU},
})
