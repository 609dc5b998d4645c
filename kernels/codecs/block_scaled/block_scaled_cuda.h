// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/codecs/block_scaled/block_scaled_formats.h"
#include "kernels/codecs/block_scaled/block_scaled_source.h"
#include "kernels/codecs/block_scaled/per_element.h"
#include "kernels/cuda_device.h"
#include "kernels/packed_rows.h"

// The block codecs on device memory, each function in one launch for any number of rows. The launchers enqueue and
// return cudaGetLastError(); they neither allocate nor synchronise, so they may be captured in a graph. Any alignment
// works.
namespace bagua::block_scaled::cuda {

template <class Element>
struct ElementKernels {
  using T = ElementTraits<Element>::Compute;

  // Writes all of the rows: keys where the format sends them, groups, and zeros behind them. `areParts`: chunks have
  // keys of their own, see Encoding::narrow().
  cudaError_t (*encode)(const Source<Element>& source, bool areParts, const Cut& cut, const PackedRows<uint8_t>& rows,
                        const CudaLaunch& launch);
  cudaError_t (*decode)(const PackedRows<const uint8_t>& rows, const Cut& cut, Element* values,
                        const CudaLaunch& launch);
  // Of the chunks in so many rows, all of `length` elements: their sum in the order of the rows, divided.
  cudaError_t (*mean)(const PackedRows<const uint8_t>& rows, int64_t copies, int64_t length, T divisor, Element* mean,
                      const CudaLaunch& launch);
};

using FormatKernels = PerElement<ElementKernels>;

template <class Format>
const FormatKernels& kernelsOf();

}  // namespace bagua::block_scaled::cuda
