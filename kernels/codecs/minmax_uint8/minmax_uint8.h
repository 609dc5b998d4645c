// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "kernels/codec.h"

// The MinMaxUInt8 codec: a tensor cut into chunks, each coded to one byte per element on a grid taken from the chunk's
// minimum and maximum. Wire format and numerics are described in kernels/README.md. Works on CPU and CUDA tensors and
// produces the same bytes on both. CUDA calls enqueue on the current stream and never synchronise the CPU.
namespace bagua::minmax_uint8 {

// `length` elements cut into `chunks`: every chunk has ceil(length / chunks) elements, the last ones fewer or none.
int64_t chunkLength(int64_t length, int64_t chunks);

// Bytes of one packed chunk: the header and one byte per element, both in multiples of 32.
int64_t packedChunkBytes(int64_t chunkLength);

int64_t packedBytes(int64_t length, int64_t chunks);

// Codes `input` (float, double, half or bfloat16) into `packed`, uint8 of packedBytes(input.numel(), chunks) elements.
// Every byte of `packed` is written; padding and unused header bytes are zero.
void compress(const at::Tensor& input, int64_t chunks, at::Tensor& packed);

// Fills `output` from what compress() made of a tensor with output's element count and dtype.
void decompress(const at::Tensor& packed, int64_t chunks, at::Tensor& output);

// Decodes `copies` packed chunks that lie one after another in `received` (rank order), adds them, divides by `divisor`
// and codes the result into `packed` (packedChunkBytes(strideLength) bytes). A chunk holds `length` elements of type
// `dtype` and is packed as if it had `strideLength`. The order of the additions depends on `copies` only.
// NOLINTNEXTLINE(readability-function-size): seven parameters, none of which belong together more than the rest.
void reduceAndCompress(const at::Tensor& received, int64_t copies, int64_t length, int64_t strideLength,
                       at::ScalarType dtype, double divisor, at::Tensor& packed);
// The same with the result as it was before it was coded in `sum`, which tells length and type.
void reduceAndCompress(const at::Tensor& received, int64_t copies, int64_t strideLength, double divisor,
                       at::Tensor& sum, at::Tensor& packed);

PackedLayout packedLayout();
// The codec for tensors of CUDA alone. Throws in a build without.
const Codec& onCuda();

}  // namespace bagua::minmax_uint8
