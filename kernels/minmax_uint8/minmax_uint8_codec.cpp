// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/codec.h"
#include "kernels/device_ways.h"
#include "kernels/minmax_uint8/minmax_uint8.h"
#include "kernels/minmax_uint8/minmax_uint8_cpu.h"
#include "kernels/minmax_uint8/minmax_uint8_kernels.h"
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

// On the CPU, codes are made piece by piece with one set of loops. On CUDA, encode() does all: the kernel that writes
// the codes writes the header and the zeros too.
class MinMaxUInt8Codec final : public Codec {
 public:
  explicit MinMaxUInt8Codec(const cpu::Loops& loops) : loops_(loops) {}

  // Vectors read codes of a mean up to the next multiple of 32, so pieces begin there.
  [[nodiscard]] PackedLayout layout() const override { return {kHeaderBytes, kAlignment, kAlignment, 1}; }

  void start(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed) const override {
    if (!worksOnHost(values)) return;
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::startChunk(loops_, dataOf<Element>(values), residualOf(encoding), values.numel(),
                      packed.mutable_data_ptr<uint8_t>(), packed.numel());
    });
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    if (!worksOnHost(values)) return encodeWhole(values, encoding, packed);
    const auto feedback = feedbackOf(encoding);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::compressPiece(loops_, dataOf<Element>(values), piece, feedback ? &*feedback : nullptr,
                         packed.mutable_data_ptr<uint8_t>());
    });
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    if (!worksOnHost(values)) return decodeWhole(packed, values);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::decompressPiece(loops_, packed.const_data_ptr<uint8_t>(), piece, mutableDataOf<Element>(values));
    });
  }

  void decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const override {
    if (!worksOnHost(sums)) {
      at::Tensor values = at::empty({sums.numel()}, sums.options().dtype(dtype));
      decodeWhole(packed, values);
      sums.add_(values);
      return;
    }
    withElement(dtype, kWhat, [&](auto element) {
      using Element = decltype(element);
      using T = ElementTraits<Element>::Compute;
      cpu::addPiece<Element>(loops_, packed.const_data_ptr<uint8_t>(), piece, mutableDataOf<T>(sums));
    });
  }

  void decodeMean(const at::Tensor& copies, const Piece& piece, double divisor, const Encoding& encoding,
                  at::Tensor& mean, at::Tensor& packed) const override {
    // There is no kernel for a mean alone: this one codes it too, and encode() does so again.
    if (!worksOnHost(mean)) return decodeMeanOnCuda(copies, divisor, mean, packed);
    const int64_t length = mean.numel();
    if (piece.begin == piece.end && length > 0) return;
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
    if (!worksOnHost(mean)) {
      decodeMeanOnCuda(copies, divisor, mean, packed);
      // The fused kernel knows no residuals.
      if (encoding.hasFeedback()) encodeWhole(mean, encoding, packed);
      return;
    }
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
    if (!isOwnGeometry(packed, chunkLength)) return Codec::encodeChunks(values, chunkLength, encoding, packed);
    if (!worksOnHost(values)) return compressChunks(values, chunkLength, encoding, packed);
    const auto feedback = feedbackOf(encoding);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      cpu::compress(loops_, dataOf<Element>(values), {values.numel(), packed.size(0), chunkLength},
                    feedback ? &*feedback : nullptr, packed.mutable_data_ptr<uint8_t>());
    });
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    if (!isOwnGeometry(packed, chunkLength)) return Codec::decodeChunks(packed, chunkLength, values);
    if (!worksOnHost(values)) return decompressChunks(packed, chunkLength, values);
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
    return Feedback{residualOf(encoding), encoding.nextResidual.mutable_data_ptr<float>()};
  }

  // Rows as the functions on many chunks expect them.
  [[nodiscard]] bool isOwnGeometry(const at::Tensor& packed, int64_t chunkLength) const {
    return areAdjacent(packed) && packed.size(1) == layout().packedBytes(chunkLength);
  }

  // The bytes of `packed` that a row of whole groups has; the kernels zero these, and we what may be left.
  static at::Tensor wholeGroups(const at::Tensor& packed) {
    const int64_t bytes = packed.numel() / kAlignment * kAlignment;
    if (packed.numel() > bytes) packed.narrow(0, bytes, packed.numel() - bytes).zero_();
    return packed.narrow(0, 0, bytes);
  }

  static void encodeWhole(const at::Tensor& values, const Encoding& encoding, const at::Tensor& packed) {
    at::Tensor row = wholeGroups(packed).unsqueeze(0);
    compressChunks(values, row.size(1) - kHeaderBytes, encoding, row);
  }

  void decodeWhole(const at::Tensor& packed, at::Tensor& values) const {
    const at::Tensor row = packed.narrow(0, 0, layout().packedBytes(values.numel())).unsqueeze(0);
    decompressChunks(row, row.size(1) - kHeaderBytes, values);
  }

  void decodeMeanOnCuda(const at::Tensor& copies, double divisor, at::Tensor& mean, at::Tensor& packed) const {
    at::Tensor row = wholeGroups(packed);
    at::Tensor received = copies;
    if (!areAdjacent(copies) || copies.size(1) != row.numel()) {
      // The kernel expects copies as long as its result, one after another.
      row = packed.narrow(0, 0, layout().packedBytes(mean.numel()));
      packed.narrow(0, row.numel(), packed.numel() - row.numel()).zero_();
      received = copies.narrow(1, 0, row.numel()).contiguous();
    }
    reduceAndCompress(received.view({-1}), copies.size(0), row.numel() - kHeaderBytes, divisor, mean, row);
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
    .position = 10,
    .codec = std::make_shared<bagua::minmax_uint8::MinMaxUInt8Codec>(bagua::minmax_uint8::cpu::bestLoops()),
    .variants = bagua::minmax_uint8::variants(),
})
