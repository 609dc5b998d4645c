// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/minmax_uint8/minmax_uint8_kernels.h"

// The codec on device memory. The launchers enqueue on `stream` and return cudaGetLastError(); they neither allocate
// nor synchronise, so they may be captured in a graph. Any alignment works; multiples of 16 bytes are fastest.
namespace bagua::minmax_uint8::cuda {

// How a chunk is shared out over blocks of threads.
struct Split {
  int64_t parts;       // Per chunk.
  int64_t partLength;  // In elements.
};

Split splitOf(const Layout& layout);

// Bytes of workspace for compress and reduceAndCompress.
template <class Element>
int64_t workspaceBytes(const Layout& layout) {
  using T = ElementTraits<Element>::Compute;
  return layout.chunks * splitOf(layout).parts * static_cast<int64_t>(sizeof(Range<T>));
}

template <class Element>
cudaError_t compress(const Element* input, const Layout& layout, uint8_t* packed, void* workspace, cudaStream_t stream);

// The same of input + residual, with the next residual.
template <class Element>
cudaError_t compressSums(const Element* input, const Layout& layout, const Feedback& feedback, uint8_t* packed,
                         void* workspace, cudaStream_t stream);

template <class Element>
cudaError_t decompress(const uint8_t* packed, const Layout& layout, Element* output, cudaStream_t stream);

// As bagua::minmax_uint8::reduceAndCompress; `layout` is that of one chunk, `sum` has room for its elements.
template <class Element>
cudaError_t reduceAndCompress(const Received& received, const Layout& layout, Element* sum, uint8_t* packed,
                              void* workspace, cudaStream_t stream);

}  // namespace bagua::minmax_uint8::cuda
