// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/blocks/blocks_formats.h"
#include "kernels/blocks/blocks_source.h"
#include "kernels/blocks/per_element.h"

// The block codecs on device memory. The launchers enqueue and return cudaGetLastError(); they neither allocate nor
// synchronise, so they may be captured in a graph. Any alignment works.
namespace bagua::blocks::cuda {

struct Launch {
  cudaStream_t stream;
  int multiprocessors;
};

struct PackedChunk {
  uint8_t* bytes;
  int64_t size;
};

template <class Element>
struct ElementKernels {
  using T = ElementTraits<Element>::Compute;

  // Writes all of the chunk: its key where the format sends it, its groups, and zeros behind them.
  cudaError_t (*encode)(const Source<Element>& source, int64_t length, const PackedChunk& packed, const Launch& launch);
  cudaError_t (*decode)(const uint8_t* packed, int64_t length, Element* values, const Launch& launch);
  cudaError_t (*add)(const uint8_t* packed, int64_t length, T* sums, const Launch& launch);
};

using FormatKernels = PerElement<ElementKernels>;

template <class Format>
const FormatKernels& kernelsOf();

}  // namespace bagua::blocks::cuda
