// SPDX-License-Identifier: Apache-2.0
#include "kernels/launch.cuh"
#include "kernels/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/minmax_uint8/minmax_uint8_cuda_common.cuh"

// Coding with error feedback, in the two steps of minmax_uint8_cuda.cu. A thread takes one element at a time: every one
// of them is a load of a float, a load of a value, a store of a float and a store of a code.
namespace bagua::minmax_uint8::cuda {
namespace {

template <class Element>
__global__ void __launch_bounds__(kThreads)
    rangeOfSumsKernel(const Element* __restrict__ input, const float* __restrict__ residual, Layout layout, Split split,
                      Range<typename ElementTraits<Element>::Compute>* __restrict__ partials) {
  using T = typename ElementTraits<Element>::Compute;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  __shared__ typename BlockReduce::TempStorage scratch;
  for (int64_t index = blockIdx.x; index < layout.chunks * split.parts; index += gridDim.x) {
    const Item item(index, layout, split);
    const int64_t first = layout.begin(item.chunk);
    Range<T> mine = emptyRange<T>();
    for (int64_t i = first + item.begin + threadIdx.x; i < first + item.end; i += kThreads) {
      const T value = sumOf(input[i], residual[i]);
      mine = merge(mine, {value, value});
    }
    const Range<T> all = BlockReduce(scratch).Reduce(mine, Merge{});
    if (threadIdx.x == 0) partials[index] = all;
    __syncthreads();  // Before the scratch is used again.
  }
}

// The residuals may be one array, so none is __restrict__.
template <class Element>
__device__ void quantizeSums(const Element* x, const Feedback& feedback, uint8_t* codes, const Item& item,
                             const Grid<typename ElementTraits<Element>::Compute>& grid) {
  for (int64_t i = item.begin + threadIdx.x; i < item.end; i += kThreads) {
    const float residual = feedback.residual[i];
    const CodedSum coded = grid.finite() ? codeSum(x[i], residual, grid) : CodedSum{0, residual};
    codes[i] = coded.code;
    feedback.next[i] = coded.residual;
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    quantizeSumsKernel(const Element* __restrict__ input, Feedback feedback, Layout layout, Split split,
                       const Range<typename ElementTraits<Element>::Compute>* __restrict__ partials,
                       uint8_t* __restrict__ packed) {
  using T = typename ElementTraits<Element>::Compute;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  __shared__ typename BlockReduce::TempStorage scratch;
  __shared__ Grid<T> grid;
  for (int64_t index = blockIdx.x; index < layout.chunks * split.parts; index += gridDim.x) {
    const Item item(index, layout, split);
    uint8_t* header = packed + item.chunk * layout.packedStride();
    const Range<T> mine = rangeOfPartials(partials + item.chunk * split.parts, split.parts);
    const Range<T> all = BlockReduce(scratch).Reduce(mine, Merge{});
    if (threadIdx.x == 0) {  // Only thread 0 holds the result of the block.
      const Range<T> range = storedRange<Element>(headerRange(all, layout.size(item.chunk)));
      if (item.part == 0) writeHeader<Element>(range, header);
      grid = makeGrid<Element>(range);
    }
    __syncthreads();
    uint8_t* codes = header + kHeaderBytes;
    const int64_t first = layout.begin(item.chunk);
    quantizeSums(input + first, feedback.from(first), codes, item, grid);
    if (item.part == split.parts - 1) clearPadding(codes, item, layout);
    __syncthreads();  // Before the grid and the scratch are used again.
  }
}

}  // namespace

template <class Element>
cudaError_t compressSums(const Element* input, const Layout& layout, const Feedback& feedback, uint8_t* packed,
                         void* workspace, cudaStream_t stream) {
  const Split split = splitOf(layout);
  const unsigned blocks = gridBlocks(layout, split);
  auto* partials = static_cast<Range<typename ElementTraits<Element>::Compute>*>(workspace);
  launchKernel(rangeOfSumsKernel<Element>, blocks, kThreads, stream, input, feedback.residual, layout, split, partials);
  launchKernel(quantizeSumsKernel<Element>, blocks, kThreads, stream, input, feedback, layout, split, partials, packed);
  return cudaGetLastError();
}

#define BAGUA_INSTANTIATE(Element)                                                                            \
  template cudaError_t compressSums<Element>(const Element*, const Layout&, const Feedback&, uint8_t*, void*, \
                                             cudaStream_t);
BAGUA_INSTANTIATE(float)
BAGUA_INSTANTIATE(double)
BAGUA_INSTANTIATE(HalfBits)
BAGUA_INSTANTIATE(BFloat16Bits)
#undef BAGUA_INSTANTIATE

}  // namespace bagua::minmax_uint8::cuda
