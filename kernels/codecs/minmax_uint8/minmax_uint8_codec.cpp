// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/codec.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cpu.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_kernels.h"
#include "kernels/tensor_elements.h"

namespace bagua::minmax_uint8 {
namespace {

// In errors.
constexpr const char* kWhat = "codec minmax_uint8";

// The range of a mean while it is made, in the header of the chunk that it will become.
Range<double> rangeSoFar(const at::Tensor& packed, const Piece& piece) {
  Range<double> range = emptyRange<double>();
  static_assert(sizeof(range) <= kHeaderBytes);
  if (piece.begin > 0) std::memcpy(&range, packed.const_data_ptr(), sizeof(range));
  return range;
}

void keepRange(const Range<double>& range, at::Tensor& packed) {
  std::memcpy(packed.mutable_data_ptr(), &range, sizeof(range));
}

// Whether rows of packed chunks lie one after another.
bool areAdjacent(const at::Tensor& rows) { return rows.size(0) <= 1 || rows.stride(0) == rows.size(1); }

// Codes are made piece by piece with one set of loops.
class MinMaxUInt8Codec final : public Codec {
 public:
  explicit MinMaxUInt8Codec(const cpu::Loops& loops) : loops_(loops) {}

  [[nodiscard]] PackedLayout layout() const override { return packedLayout(); }

  void start(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda().start(values, encoding, packed);
    encoding.restoreIfLost({0, values.numel()});
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::startChunk(loops_, dataOf<Element>(values), residualOf(encoding), values.numel(),
                      packed.mutable_data_ptr<uint8_t>(), packed.numel());
    });
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda().encode(values, piece, encoding, packed);
    encoding.restoreIfLost(piece);
    const auto feedback = feedbackOf(encoding);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::compressPiece(loops_, dataOf<Element>(values), piece, feedback ? &*feedback : nullptr,
                         packed.mutable_data_ptr<uint8_t>());
    });
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    if (values.is_cuda()) return onCuda().decode(packed, piece, values);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::decompressPiece(loops_, packed.const_data_ptr<uint8_t>(), piece, mutableDataOf<Element>(values));
    });
  }

  void decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const override {
    if (sums.is_cuda()) return onCuda().decodeAdd(packed, piece, dtype, sums);
    withElement(dtype, kWhat, [&](auto element) {
      using Element = decltype(element);
      using T = ElementTraits<Element>::Compute;
      cpu::addPiece<Element>(loops_, packed.const_data_ptr<uint8_t>(), piece, mutableDataOf<T>(sums));
    });
  }

  void decodeMean(const at::Tensor& copies, const Piece& piece, double divisor, const Encoding& encoding,
                  at::Tensor& mean, at::Tensor& packed) const override {
    if (mean.is_cuda()) return onCuda().decodeMean(copies, piece, divisor, encoding, mean, packed);
    const int64_t length = mean.numel();
    if (piece.begin == piece.end && length > 0) return;
    encoding.restoreIfLost(piece);
    const Received received = {copies.const_data_ptr<uint8_t>(), copies.size(0), divisor};
    Range<double> range = rangeSoFar(packed, piece);
    withElement(mean.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      auto* sums = mutableDataOf<Element>(mean);
      range = merge(range, cpu::reducePiece(loops_, received, copies.stride(0), piece, residualOf(encoding), sums));
      if (piece.end < length) return keepRange(range, packed);
      cpu::startChunk<Element>(range, length, packed.mutable_data_ptr<uint8_t>(), packed.numel());
    });
  }

  void decodeMeanAndEncode(const at::Tensor& copies, double divisor, const Encoding& encoding, at::Tensor& mean,
                           at::Tensor& packed) const override {
    if (mean.is_cuda()) return onCuda().decodeMeanAndEncode(copies, divisor, encoding, mean, packed);
    if (encoding.hasFeedback() || !areAdjacent(copies) || copies.size(1) != packed.numel() ||
        packed.numel() % kAlignment != 0) {
      return Codec::decodeMeanAndEncode(copies, divisor, encoding, mean, packed);
    }
    withElement(mean.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      const Received received = {copies.const_data_ptr<uint8_t>(), copies.size(0), divisor};
      const Layout layout = {mean.numel(), 1, packed.numel() - kHeaderBytes};
      cpu::reduceAndCompress(loops_, received, layout, mutableDataOf<Element>(mean),
                             packed.mutable_data_ptr<uint8_t>());
    });
  }

  void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                    at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda().encodeChunks(values, chunkLength, encoding, packed);
    if (!isOwnGeometry(packed, chunkLength)) return Codec::encodeChunks(values, chunkLength, encoding, packed);
    encoding.restoreIfLost({0, values.numel()});
    const auto feedback = feedbackOf(encoding);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::compress(loops_, dataOf<Element>(values), {values.numel(), packed.size(0), chunkLength},
                    feedback ? &*feedback : nullptr, packed.mutable_data_ptr<uint8_t>());
    });
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    if (values.is_cuda()) return onCuda().decodeChunks(packed, chunkLength, values);
    if (!isOwnGeometry(packed, chunkLength)) return Codec::decodeChunks(packed, chunkLength, values);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::decompress(loops_, packed.const_data_ptr<uint8_t>(), {values.numel(), packed.size(0), chunkLength},
                      mutableDataOf<Element>(values));
    });
  }

 private:
  static const float* residualOf(const Encoding& encoding) {
    return encoding.hasFeedback() ? encoding.residual.const_data_ptr<float>() : nullptr;
  }

  static std::optional<Feedback> feedbackOf(const Encoding& encoding) {
    if (!encoding.hasFeedback()) return std::nullopt;
    return Feedback{encoding.residual.mutable_data_ptr<float>(), encoding.nextResidual.mutable_data_ptr<float>()};
  }

  // Rows as the functions on many chunks expect them.
  [[nodiscard]] bool isOwnGeometry(const at::Tensor& packed, int64_t chunkLength) const {
    return areAdjacent(packed) && packed.size(1) == layout().packedBytes(chunkLength);
  }

  const cpu::Loops& loops_;
};

std::vector<std::shared_ptr<const Codec>> variants() {
  std::vector<std::shared_ptr<const Codec>> all;
  for (const cpu::Loops* loops : cpu::availableLoops()) all.push_back(std::make_shared<MinMaxUInt8Codec>(*loops));
  return all;
}

}  // namespace
}  // namespace bagua::minmax_uint8

BAGUA_REGISTER_CODEC({
    .name = "minmax_uint8",
    .summary = "one byte per element, on a grid from the chunk's minimum to its maximum",
    .position = 60,
    .codec = std::make_shared<bagua::minmax_uint8::MinMaxUInt8Codec>(bagua::minmax_uint8::cpu::bestLoops()),
    .variants = bagua::minmax_uint8::variants(),
})
