// SPDX-License-Identifier: Apache-2.0
// A codec for the contract tests, as simple as one can be: written from kernels/codec.h alone, to see that it suffices,
// and with groups of several elements, an alignment of its own and random rounding. On the CPU only.
#include <ATen/Dispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "kernels/codec.h"

namespace bagua {
namespace {

constexpr int64_t kGroup = 8;

// What a group's bytes are: each value is scale * level / 127.
struct Group {
  float scale = 0;
  int8_t levels[kGroup] = {};
};

constexpr PackedLayout kLayout{.headerBytes = 4, .groupElements = kGroup, .groupBytes = sizeof(Group), .alignment = 16};

double valueOf(const Group& group, int64_t i) {
  return static_cast<double>(group.scale) * static_cast<double>(group.levels[i]) / 127.0;
}

// In [0, 1).
double draw(uint64_t key, int64_t element) {
  const uint64_t bits = (key ^ (static_cast<uint64_t>(element) * 0x9E3779B97F4A7C15U)) * 0xD1342543DE82EF95U;
  return static_cast<double>(bits >> 11U) * 0x1p-53;
}

// Values of one chunk, or their sums with residuals.
template <class Element>
class Source {
 public:
  using Compute = std::conditional_t<std::is_same_v<Element, double>, double, float>;

  Source(const at::Tensor& values, const Encoding& encoding)
      : values_(values.const_data_ptr<Element>()),
        residual_(encoding.hasFeedback() ? encoding.residual.const_data_ptr<float>() : nullptr),
        next_(encoding.hasFeedback() ? encoding.nextResidual.mutable_data_ptr<float>() : nullptr) {}

  [[nodiscard]] Compute at(int64_t element) const {
    const auto value = static_cast<Compute>(values_[element]);
    return residual_ == nullptr ? value : value + static_cast<Compute>(residual_[element]);
  }

  void keepRest(int64_t element, double decoded) const {
    if (next_ == nullptr) return;
    constexpr Compute kMax = std::numeric_limits<float>::max();
    const Compute rest = at(element) - static_cast<Compute>(static_cast<Element>(decoded));
    next_[element] =
        std::isnan(decoded) ? residual_[element] : static_cast<float>(std::clamp<Compute>(rest, -kMax, kMax));
  }

 private:
  const Element* values_;
  const float* residual_;
  float* next_;
};

// Values must stay numbers of their type, and scales floats.
template <class Element>
double largestScale() {
  return std::min(static_cast<double>(std::numeric_limits<Element>::max()),
                  static_cast<double>(std::numeric_limits<float>::max()));
}

template <class Element>
Group codeGroup(const Source<Element>& source, int64_t begin, int64_t end, const Encoding& encoding) {
  double largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const double size = std::abs(static_cast<double>(source.at(i)));
    largest = size > largest || std::isnan(size) ? size : largest;
    if (std::isnan(largest)) break;
  }
  Group group;
  group.scale = std::isfinite(largest) ? static_cast<float>(std::min<double>(largest, largestScale<Element>()))
                                       : std::numeric_limits<float>::quiet_NaN();
  if (std::isnan(group.scale) || group.scale == 0) return group;
  for (int64_t i = begin; i < end; ++i) {
    const double level = static_cast<double>(source.at(i)) / static_cast<double>(group.scale) * 127.0;
    const double rounded =
        encoding.rounding == Rounding::kNearest ? std::nearbyint(level) : std::floor(level + draw(encoding.key, i));
    group.levels[i - begin] = static_cast<int8_t>(std::clamp(rounded, -127.0, 127.0));
  }
  return group;
}

class BlocksCodec final : public Codec {
 public:
  [[nodiscard]] PackedLayout layout() const override { return kLayout; }
  [[nodiscard]] bool canRoundStochastically() const override { return true; }

  void start(const at::Tensor& values, const Encoding& /*encoding*/, at::Tensor& packed) const override {
    auto* bytes = packed.mutable_data_ptr<uint8_t>();
    const int64_t end = kLayout.headerBytes + (values.numel() + kGroup - 1) / kGroup * kLayout.groupBytes;
    std::memset(bytes, 0, kLayout.headerBytes);
    std::memset(bytes + end, 0, packed.numel() - end);
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    encoding.restoreIfLost(piece);
    auto* bytes = packed.mutable_data_ptr<uint8_t>();
    withElement(values.scalar_type(), [&](auto element) {
      const Source<decltype(element)> source(values, encoding);
      for (int64_t begin = piece.begin; begin < piece.end; begin += kGroup) {
        const int64_t end = std::min(begin + kGroup, piece.end);
        const Group group = codeGroup(source, begin, end, encoding);
        std::memcpy(bytes + offsetOf(begin), &group, sizeof(group));
        for (int64_t i = begin; i < end; ++i) source.keepRest(i, valueOf(group, i - begin));
      }
    });
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    withElement(values.scalar_type(), [&](auto element) {
      using Element = decltype(element);
      auto* to = values.mutable_data_ptr<Element>();
      visit(packed, piece, [&](int64_t i, double value) { to[i] = static_cast<Element>(value); });
    });
  }

  void decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const override {
    withElement(dtype, [&](auto element) {
      using Element = decltype(element);
      using Compute = Source<Element>::Compute;
      auto* to = sums.mutable_data_ptr<Compute>();
      visit(packed, piece,
            [&](int64_t i, double value) { to[i - piece.begin] += static_cast<Compute>(static_cast<Element>(value)); });
    });
  }

 private:
  static int64_t offsetOf(int64_t element) { return kLayout.headerBytes + element / kGroup * kLayout.groupBytes; }

  template <class F>
  static void withElement(at::ScalarType dtype, const F& f) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "blocks_for_tests", [&] { f(scalar_t{}); });
  }

  template <class F>
  static void visit(const at::Tensor& packed, const Piece& piece, const F& f) {
    const auto* bytes = packed.const_data_ptr<uint8_t>();
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      Group group;
      std::memcpy(&group, bytes + offsetOf(i), sizeof(group));
      f(i, valueOf(group, i % kGroup));
    }
  }
};

}  // namespace
}  // namespace bagua

BAGUA_REGISTER_CODEC({
    .name = "blocks_for_tests",
    .summary = "eight levels to a scale",
    .position = 1000,
    .codec = std::make_shared<bagua::BlocksCodec>(),
})
