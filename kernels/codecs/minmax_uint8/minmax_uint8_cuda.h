// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/codecs/minmax_uint8/minmax_uint8_kernels.h"

// The codec on device memory. The launchers enqueue on `stream` and return cudaGetLastError(); they neither allocate
// nor synchronise, so they may be captured in a graph. Any alignment works; multiples of 16 bytes are fastest.
namespace bagua::minmax_uint8::cuda {

// How a chunk is shared out over blocks of threads.
struct Split {
  int64_t parts;       // Per chunk.
  int64_t partLength;  // In elements.
};

Split splitOf(const Cut& cut);

// Bytes of workspace, for the ranges of the parts of all chunks.
template <class Element>
int64_t workspaceBytes(const Cut& cut) {
  using T = ElementTraits<Element>::Compute;
  return cut.chunks * splitOf(cut).parts * static_cast<int64_t>(sizeof(Range<T>));
}

// Coding takes two launches: findRanges() or mean() fills the workspace, then encode() writes all of the rows. Without
// residuals `feedback` has null pointers; the next ones are written by encode().
template <class Element>
cudaError_t findRanges(const Element* input, const Feedback& feedback, const Cut& cut, void* workspace,
                       cudaStream_t stream);

template <class Element>
cudaError_t encode(const Element* input, const Feedback& feedback, const Cut& cut, const void* workspace,
                   const PackedRows<uint8_t>& rows, cudaStream_t stream);

template <class Element>
cudaError_t decode(const PackedRows<const uint8_t>& rows, const Cut& cut, Element* output, cudaStream_t stream);

// Packed chunks of the same elements, to be added and divided.
struct Copies {
  PackedRows<const uint8_t> rows;
  int64_t count;
  double divisor;
};

// Of one chunk of `length` elements; with its ranges, or those of its sums with residuals.
template <class Element>
cudaError_t mean(const Copies& copies, const Feedback& feedback, int64_t length, Element* output, void* workspace,
                 cudaStream_t stream);

}  // namespace bagua::minmax_uint8::cuda
