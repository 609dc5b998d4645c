// SPDX-License-Identifier: Apache-2.0
#include "kernels/minmax_uint8/minmax_uint8_pieces.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "kernels/minmax_uint8/minmax_uint8.h"
#include "kernels/minmax_uint8/minmax_uint8_cpu.h"
#include "kernels/minmax_uint8/minmax_uint8_dtypes.h"

namespace bagua::minmax_uint8 {
namespace {

void check(const at::Tensor& values, const Piece& piece, const at::Tensor& packed) {
  TORCH_CHECK_VALUE(values.is_cpu() && values.is_contiguous(),
                    "minmax_uint8 codes pieces of contiguous CPU tensors, got one on ", values.device(),
                    " with strides ", values.strides());
  TORCH_CHECK_VALUE(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.is_cpu() &&
                        packed.numel() >= packedChunkBytes(values.numel()),
                    "minmax_uint8: ", values.numel(), " elements are packed into ", packedChunkBytes(values.numel()),
                    " bytes or more, got ", packed.numel(), " of ", packed.scalar_type());
  TORCH_CHECK_VALUE(0 <= piece.begin && piece.begin <= piece.end && piece.end <= values.numel(),
                    "minmax_uint8: elements ", piece.begin, " to ", piece.end, " of ", values.numel());
}

}  // namespace

Piece pieceIn(int64_t beginByte, int64_t endByte, int64_t length) {
  return {std::clamp<int64_t>(beginByte - kHeaderBytes, 0, length),
          std::clamp<int64_t>(endByte - kHeaderBytes, 0, length)};
}

void startChunk(const at::Tensor& values, at::Tensor& packed) {
  check(values, {0, values.numel()}, packed);
  withElement(values.scalar_type(), "of pieces", [&](auto element) {
    using Element = decltype(element);
    cpu::startChunk(cpu::bestLoops(), static_cast<const Element*>(values.const_data_ptr()), nullptr, values.numel(),
                    packed.mutable_data_ptr<uint8_t>(), packed.numel());
  });
}

void startChunk(const at::Tensor& values, const Range<double>& range, at::Tensor& packed) {
  check(values, {0, values.numel()}, packed);
  withElement(values.scalar_type(), "of pieces", [&](auto element) {
    using Element = decltype(element);
    cpu::startChunk<Element>(range, values.numel(), packed.mutable_data_ptr<uint8_t>(), packed.numel());
  });
}

void compressPiece(const at::Tensor& values, const Piece& piece, at::Tensor& packed) {
  check(values, piece, packed);
  withElement(values.scalar_type(), "of pieces", [&](auto element) {
    using Element = decltype(element);
    cpu::compressPiece(cpu::bestLoops(), static_cast<const Element*>(values.const_data_ptr()), piece, nullptr,
                       packed.mutable_data_ptr<uint8_t>());
  });
}

void decompressPiece(const at::Tensor& packed, const Piece& piece, at::Tensor& values) {
  check(values, piece, packed);
  withElement(values.scalar_type(), "of pieces", [&](auto element) {
    using Element = decltype(element);
    cpu::decompressPiece(cpu::bestLoops(), packed.const_data_ptr<uint8_t>(), piece,
                         static_cast<Element*>(values.mutable_data_ptr()));
  });
}

Range<double> reducePiece(const at::Tensor& received, int64_t copies, const Piece& piece, double divisor,
                          at::Tensor& sum) {
  TORCH_CHECK_VALUE(copies > 0 && received.numel() % copies == 0, "minmax_uint8: ", received.numel(),
                    " bytes do not hold ", copies, " chunks");
  const int64_t stride = received.numel() / copies;
  check(sum, piece, received.narrow(0, 0, stride));
  // A piece past the end of a short chunk begins at that end.
  auto range = emptyRange<double>();
  if (piece.begin == piece.end) return range;
  TORCH_CHECK_VALUE(piece.begin % kAlignment == 0, "minmax_uint8: a piece of a reduction begins at a multiple of ",
                    kAlignment, ", got ", piece.begin);
  withElement(sum.scalar_type(), "of pieces", [&](auto element) {
    using Element = decltype(element);
    range = cpu::reducePiece(cpu::bestLoops(), {received.const_data_ptr<uint8_t>(), copies, divisor}, stride, piece,
                             nullptr, static_cast<Element*>(sum.mutable_data_ptr()));
  });
  return range;
}

}  // namespace bagua::minmax_uint8
