// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/codec.h"
#include "kernels/minmax_uint8/minmax_uint8_kernels.h"

// One chunk of the MinMaxUInt8 codec on the CPU, coded and decoded piece by piece while other pieces travel. The bytes
// and values are those of minmax_uint8.h. `packed` has packedChunkBytes(strideLength) bytes, strideLength at least
// the number of values; values are contiguous float, double, half or bfloat16.
namespace bagua::minmax_uint8 {

using bagua::Piece;

// Elements whose codes lie in bytes [begin, end) of a packed chunk of `length` elements.
Piece pieceIn(int64_t beginByte, int64_t endByte, int64_t length);

// Everything of a packed chunk but the codes: the range of `values`, and zeros after them.
void startChunk(const at::Tensor& values, at::Tensor& packed);
// The same where the range is known: what reducePiece() returned for the pieces of `values`, merged.
void startChunk(const at::Tensor& values, const Range<double>& range, at::Tensor& packed);
// The codes of a piece, in a chunk that was started.
void compressPiece(const at::Tensor& values, const Piece& piece, at::Tensor& packed);
// `packed` holds the header and the codes of this piece at least.
void decompressPiece(const at::Tensor& packed, const Piece& piece, at::Tensor& values);
// `received`: `copies` packed chunks one after another. A piece of their sum divided by `divisor`, into `sum`. Pieces
// begin at multiples of 32. Returns the range of what it wrote, to be had while that is in a cache.
Range<double> reducePiece(const at::Tensor& received, int64_t copies, const Piece& piece, double divisor,
                          at::Tensor& sum);

}  // namespace bagua::minmax_uint8
