// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/launch.cuh"

// These kernels are as short as they can be. A chunk is coded by one block of threads, which has to know its range
// first: that leaves most of a large device idle. Scripts of the original need the packets, and nobody else needs them.
namespace bagua::minmax_uint8::cuda {
namespace {

constexpr int kThreads = 512;
// On a multiprocessor: enough to hide the memory's latency.
constexpr int64_t kBlocksOfMultiprocessor = 4;

struct Merge {
  template <class T>
  __device__ Range<T> operator()(Range<T> a, Range<T> b) const {
    return merge(a, b);
  }
};

// The residuals may be one array.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    encodeKernel(const Element* __restrict__ values, Feedback feedback, Cut cut, PackedRows<uint8_t> rows) {
  using T = ComputeOf<Element>;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  __shared__ typename BlockReduce::TempStorage scratch;
  __shared__ Range<T> range;
  const bool wasLost = feedback.wasLost != nullptr && *feedback.wasLost;
  const float* residual = wasLost ? feedback.next : feedback.residual;
  const int64_t begin = cut.begin(blockIdx.x);
  const int64_t length = cut.size(blockIdx.x);
  Range<T> mine = emptyRange<T>();
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < length; i += kThreads) {
    const T value = sumAt(values, residual, begin + i);
    mine = merge(mine, {value, value});
  }
  const Range<T> all = BlockReduce(scratch).Reduce(mine, Merge{});
  uint8_t* header = rows.row(blockIdx.x);
  if (threadIdx.x == 0) {  // Only thread 0 holds the result of the block.
    range = headerRange<Element>(all, length);
    writeHeader<Element>(range, header);
  }
  __syncthreads();
  const Grid<T> grid = makeGrid<Element>(range);
  uint8_t* codes = header + kHeaderBytes;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < length; i += kThreads) {
    const int64_t element = begin + i;
    const T sum = sumAt(values, residual, element);
    const uint8_t code = grid.isFinite() ? quantize(sum, grid) : uint8_t{0};
    codes[i] = code;
    if (residual == nullptr) continue;
    const float before = residual[element];
    if (wasLost) feedback.residual[element] = before;
    feedback.next[element] = grid.isFinite() ? restOf<Element>(sum, code, grid) : before;
  }
  for (int64_t i = length + threadIdx.x; i < rows.rowBytes - kHeaderBytes; i += kThreads) codes[i] = 0;
}

// Calls f(element) for this thread's elements of [0, length).
template <class F>
__device__ void forElements(int64_t length, const F& f) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < length; i += threads) f(i);
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    decodeKernel(PackedRows<const uint8_t> rows, Cut cut, Element* __restrict__ values) {
  forElements(cut.length, [&](int64_t element) {
    const uint8_t* header = rows.row(element / cut.stride);
    const auto grid = gridOf<Element>(header);
    const uint8_t code = header[kHeaderBytes + element % cut.stride];
    values[element] = grid.isFinite() ? dequantize<Element>(code, grid) : ElementTraits<Element>::nan();
  });
}

template <class Element>
__global__ void __launch_bounds__(kThreads) meanKernel(PackedRows<const uint8_t> rows, int64_t copies, int64_t length,
                                                       ComputeOf<Element> divisor, Element* __restrict__ mean) {
  using Traits = ElementTraits<Element>;
  const int64_t sumCount = partialSumCount(copies);
  forElements(length, [&](int64_t element) {
    ComputeOf<Element> sums[kMostPartialSums] = {};
    for (int64_t copy = 0; copy < copies; ++copy) {
      const uint8_t* header = rows.row(copy);
      // Rounded to the tensor's type first: the original decodes into a tensor before it adds.
      sums[copy % sumCount] +=
          Traits::load(dequantize<Element>(header[kHeaderBytes + element], gridOf<Element>(header)));
    }
    for (int64_t half = sumCount / 2; half > 0; half /= 2) {
      for (int64_t t = 0; t < half; ++t) sums[t] += sums[half + t];
    }
    mean[element] = Traits::store(divide(sums[0], divisor));
  });
}

unsigned blocksFor(int64_t elements, const CudaLaunch& launch) {
  const int64_t wanted = (elements + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::min<int64_t>(wanted, launch.multiprocessors * kBlocksOfMultiprocessor));
}

}  // namespace

template <class Element>
cudaError_t encode(const Element* values, const Feedback& feedback, const Cut& cut, const PackedRows<uint8_t>& rows,
                   const CudaLaunch& launch) {
  if (cut.chunks == 0) return cudaSuccess;
  launchKernel(encodeKernel<Element>, static_cast<unsigned>(cut.chunks), kThreads, launch.stream, values, feedback, cut,
               rows);
  return cudaGetLastError();
}

template <class Element>
cudaError_t decode(const PackedRows<const uint8_t>& rows, const Cut& cut, Element* values, const CudaLaunch& launch) {
  if (cut.length == 0) return cudaSuccess;
  launchKernel(decodeKernel<Element>, blocksFor(cut.length, launch), kThreads, launch.stream, rows, cut, values);
  return cudaGetLastError();
}

template <class Element>
cudaError_t mean(const PackedRows<const uint8_t>& rows, int64_t copies, int64_t length, double divisor, Element* mean,
                 const CudaLaunch& launch) {
  if (length == 0) return cudaSuccess;
  launchKernel(meanKernel<Element>, blocksFor(length, launch), kThreads, launch.stream, rows, copies, length,
               static_cast<ComputeOf<Element>>(divisor), mean);
  return cudaGetLastError();
}

#define BAGUA_INSTANTIATE(Element)                                                                                 \
  template cudaError_t encode<Element>(const Element*, const Feedback&, const Cut&, const PackedRows<uint8_t>&,    \
                                       const CudaLaunch&);                                                         \
  template cudaError_t decode<Element>(const PackedRows<const uint8_t>&, const Cut&, Element*, const CudaLaunch&); \
  template cudaError_t mean<Element>(const PackedRows<const uint8_t>&, int64_t, int64_t, double, Element*,         \
                                     const CudaLaunch&);
BAGUA_INSTANTIATE(float)
BAGUA_INSTANTIATE(double)
BAGUA_INSTANTIATE(HalfBits)
BAGUA_INSTANTIATE(BFloat16Bits)
#undef BAGUA_INSTANTIATE

}  // namespace bagua::minmax_uint8::cuda
