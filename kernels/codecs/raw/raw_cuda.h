// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda_device.h"
#include "kernels/elements.h"
#include "kernels/packed_rows.h"

// Rows of values as they are, on device memory, each function in one launch for any number of rows. The launchers
// enqueue and return cudaGetLastError(). Rows may have any alignment.
namespace bagua::raw {

// Writes all of the rows: the chunks' values, and zeros behind them. `cut` is in bytes.
cudaError_t writeRows(const uint8_t* values, const Cut& cut, const PackedRows<uint8_t>& rows, const CudaLaunch& launch);
cudaError_t readRows(const PackedRows<const uint8_t>& rows, const Cut& cut, uint8_t* values, const CudaLaunch& launch);

// The sum of so many rows, each of `length` values, in their order, divided.
template <class Element>
cudaError_t meanOfRows(const PackedRows<const uint8_t>& rows, int64_t copies, int64_t length,
                       typename ElementTraits<Element>::Compute divisor, Element* mean, const CudaLaunch& launch);

}  // namespace bagua::raw
