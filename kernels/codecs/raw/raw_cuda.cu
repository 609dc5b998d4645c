// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/raw/raw_cuda.h"
#include "kernels/launch.cuh"

namespace bagua::raw {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksOfMultiprocessor = 8;

// So many for `wanted` threads' work, which threads share in strides of the grid.
unsigned blocksFor(int64_t wanted, const CudaLaunch& launch) {
  const int64_t blocks = (wanted + kThreads - 1) / kThreads;
  const int64_t most = static_cast<int64_t>(launch.multiprocessors) * kBlocksOfMultiprocessor;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

__device__ int64_t firstOfThread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

// Neighbouring threads take neighbouring bytes: exact values are few, so that a launch costs more than they do.
__global__ void __launch_bounds__(kThreads)
    writeKernel(const uint8_t* __restrict__ values, Cut cut, PackedRows<uint8_t> rows, unsigned blocks) {
  const int64_t all = cut.chunks * rows.rowBytes;
  for (int64_t i = firstOfThread(); i < all; i += static_cast<int64_t>(blocks) * kThreads) {
    const int64_t chunk = i / rows.rowBytes;
    const int64_t place = i - chunk * rows.rowBytes;
    rows.row(chunk)[place] = place < cut.size(chunk) ? values[cut.begin(chunk) + place] : uint8_t{0};
  }
}

__global__ void __launch_bounds__(kThreads)
    readKernel(PackedRows<const uint8_t> rows, Cut cut, uint8_t* __restrict__ values, unsigned blocks) {
  for (int64_t i = firstOfThread(); i < cut.length; i += static_cast<int64_t>(blocks) * kThreads) {
    const int64_t chunk = i / cut.stride;
    values[i] = rows.row(chunk)[i - chunk * cut.stride];
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    meanKernel(PackedRows<const uint8_t> rows, int64_t copies, int64_t length,
               typename ElementTraits<Element>::Compute divisor, Element* __restrict__ mean, unsigned blocks) {
  using Traits = ElementTraits<Element>;
  for (int64_t i = firstOfThread(); i < length; i += static_cast<int64_t>(blocks) * kThreads) {
    typename Traits::Compute sum = 0;
    for (int64_t copy = 0; copy < copies; ++copy) {
      Element value;
      memcpy(&value, rows.row(copy) + i * static_cast<int64_t>(sizeof(Element)), sizeof(Element));
      sum += Traits::load(value);
    }
    mean[i] = Traits::store(sum / divisor);
  }
}

}  // namespace

cudaError_t writeRows(const uint8_t* values, const Cut& cut, const PackedRows<uint8_t>& rows,
                      const CudaLaunch& launch) {
  if (cut.chunks * rows.rowBytes == 0) return cudaSuccess;
  const unsigned blocks = blocksFor(cut.chunks * rows.rowBytes, launch);
  launchKernel(writeKernel, blocks, kThreads, launch.stream, values, cut, rows, blocks);
  return cudaGetLastError();
}

cudaError_t readRows(const PackedRows<const uint8_t>& rows, const Cut& cut, uint8_t* values, const CudaLaunch& launch) {
  if (cut.length == 0) return cudaSuccess;
  const unsigned blocks = blocksFor(cut.length, launch);
  launchKernel(readKernel, blocks, kThreads, launch.stream, rows, cut, values, blocks);
  return cudaGetLastError();
}

template <class Element>
cudaError_t meanOfRows(const PackedRows<const uint8_t>& rows, int64_t copies, int64_t length,
                       typename ElementTraits<Element>::Compute divisor, Element* mean, const CudaLaunch& launch) {
  if (length == 0) return cudaSuccess;
  const unsigned blocks = blocksFor(length, launch);
  launchKernel(meanKernel<Element>, blocks, kThreads, launch.stream, rows, copies, length, divisor, mean, blocks);
  return cudaGetLastError();
}

template cudaError_t meanOfRows<float>(const PackedRows<const uint8_t>&, int64_t, int64_t, float, float*,
                                       const CudaLaunch&);
template cudaError_t meanOfRows<double>(const PackedRows<const uint8_t>&, int64_t, int64_t, double, double*,
                                        const CudaLaunch&);
template cudaError_t meanOfRows<HalfBits>(const PackedRows<const uint8_t>&, int64_t, int64_t, float, HalfBits*,
                                          const CudaLaunch&);
template cudaError_t meanOfRows<BFloat16Bits>(const PackedRows<const uint8_t>&, int64_t, int64_t, float, BFloat16Bits*,
                                              const CudaLaunch&);

}  // namespace bagua::raw
