// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda_common.cuh"
#include "kernels/launch.cuh"

// Coding with error feedback, in the two steps of minmax_uint8_cuda.cu. A thread takes one element at a time: every one
// of them is a load of a float, a load of a value, a store of a float and a store of a code.
namespace bagua::minmax_uint8::cuda {
namespace {

template <class Element>
__global__ void __launch_bounds__(kThreads)
    rangeOfSumsKernel(const Element* __restrict__ input, Feedback feedback, Cut cut, Split split,
                      Range<typename ElementTraits<Element>::Compute>* __restrict__ partials) {
  using T = typename ElementTraits<Element>::Compute;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  __shared__ typename BlockReduce::TempStorage scratch;
  const float* residual = residualsOf(feedback);
  for (int64_t index = blockIdx.x; index < cut.chunks * split.parts; index += gridDim.x) {
    const Item item(index, cut, split);
    const int64_t first = cut.begin(item.chunk);
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
  const float* residuals = residualsOf(feedback);
  const bool wasLost = residuals != feedback.residual;
  for (int64_t i = item.begin + threadIdx.x; i < item.end; i += kThreads) {
    const float residual = residuals[i];
    if (wasLost) feedback.residual[i] = residual;
    const CodedSum coded = grid.finite() ? codeSum(x[i], residual, grid) : CodedSum{0, residual};
    codes[i] = coded.code;
    feedback.next[i] = coded.residual;
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    quantizeSumsKernel(const Element* __restrict__ input, Feedback feedback, Cut cut, Split split,
                       const Range<typename ElementTraits<Element>::Compute>* __restrict__ partials,
                       PackedRows<uint8_t> rows) {
  using T = typename ElementTraits<Element>::Compute;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  __shared__ typename BlockReduce::TempStorage scratch;
  __shared__ Grid<T> grid;
  for (int64_t index = blockIdx.x; index < cut.chunks * split.parts; index += gridDim.x) {
    const Item item(index, cut, split);
    uint8_t* header = rows.row(item.chunk);
    const Range<T> mine = rangeOfPartials(partials + item.chunk * split.parts, split.parts);
    const Range<T> all = BlockReduce(scratch).Reduce(mine, Merge{});
    if (threadIdx.x == 0) {  // Only thread 0 holds the result of the block.
      const Range<T> range = storedRange<Element>(headerRange(all, cut.size(item.chunk)));
      if (item.part == 0) writeHeader<Element>(range, header);
      grid = makeGrid<Element>(range);
    }
    // It also ends this use of the scratch. The next grid waits for all threads in the next reduction.
    __syncthreads();
    uint8_t* codes = header + kHeaderBytes;
    const int64_t first = cut.begin(item.chunk);
    quantizeSums(input + first, feedback.from(first), codes, item, grid);
    if (item.part == split.parts - 1) clearPadding(codes, cut.size(item.chunk), rows.rowBytes);
  }
}

}  // namespace

template <class Element>
void launchRangesOfSums(const Element* input, const Feedback& feedback, const Cut& cut, const Split& split,
                        Range<typename ElementTraits<Element>::Compute>* partials, cudaStream_t stream) {
  launchKernel(rangeOfSumsKernel<Element>, gridBlocks(cut, split), kThreads, stream, input, feedback, cut, split,
               partials);
}

template <class Element>
void launchQuantizeSums(const Element* input, const Feedback& feedback, const Cut& cut, const Split& split,
                        const Range<typename ElementTraits<Element>::Compute>* partials,
                        const PackedRows<uint8_t>& rows, cudaStream_t stream) {
  launchKernel(quantizeSumsKernel<Element>, gridBlocks(cut, split), kThreads, stream, input, feedback, cut, split,
               partials, rows);
}

#define BAGUA_INSTANTIATE(Element)                                                                                     \
  template void launchRangesOfSums<Element>(const Element*, const Feedback&, const Cut&, const Split&,                 \
                                            Range<ElementTraits<Element>::Compute>*, cudaStream_t);                    \
  template void launchQuantizeSums<Element>(const Element*, const Feedback&, const Cut&, const Split&,                 \
                                            const Range<ElementTraits<Element>::Compute>*, const PackedRows<uint8_t>&, \
                                            cudaStream_t);
BAGUA_INSTANTIATE(float)
BAGUA_INSTANTIATE(double)
BAGUA_INSTANTIATE(HalfBits)
BAGUA_INSTANTIATE(BFloat16Bits)
#undef BAGUA_INSTANTIATE

}  // namespace bagua::minmax_uint8::cuda
