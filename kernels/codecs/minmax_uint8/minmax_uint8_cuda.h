// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/codecs/minmax_uint8/minmax_uint8_numbers.h"
#include "kernels/cuda_device.h"
#include "kernels/packed_rows.h"

// The codec on device memory, a launch for each call, which may be captured in a graph.
namespace bagua::minmax_uint8::cuda {

// As Encoding has it: null pointers without error feedback.
struct Feedback {
  float* residual = nullptr;
  float* next = nullptr;
  const bool* wasLost = nullptr;
};

template <class Element>
cudaError_t encode(const Element* values, const Feedback& feedback, const Cut& cut, const PackedRows<uint8_t>& rows,
                   const CudaLaunch& launch);

template <class Element>
cudaError_t decode(const PackedRows<const uint8_t>& rows, const Cut& cut, Element* values, const CudaLaunch& launch);

// Of one chunk of `length` elements, of which each of the rows is a copy.
template <class Element>
cudaError_t mean(const PackedRows<const uint8_t>& rows, int64_t copies, int64_t length, double divisor, Element* mean,
                 const CudaLaunch& launch);

}  // namespace bagua::minmax_uint8::cuda
