// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda_common.cuh"
#include "kernels/launch.cuh"

// Decoding, adding and finding the range in one pass; the mean is then coded like any other chunk.
namespace bagua::minmax_uint8::cuda {
namespace {

// The decoders of up to kMaxPartialSums copies from `first` on. `first` is a multiple of kMaxPartialSums, so that copy
// first + i belongs to partial sum i modulo their number. All threads of a block call it together.
template <class Element>
__device__ void loadDecoders(const Copies& copies, int64_t first,
                             Decoder<typename ElementTraits<Element>::Compute>* decoders) {
  __syncthreads();
  const int64_t copy = first + threadIdx.x;
  if (threadIdx.x < kMaxPartialSums && copy < copies.count) {
    const auto range = readHeader<Element>(copies.rows.row(copy));
    decoders[threadIdx.x] = makeDecoder(makeGrid<Element>(range));
  }
  __syncthreads();
}

template <class T, int kPartialSums>
__device__ T sumOfPartialSums(T (&sums)[kPartialSums]) {
#pragma unroll
  for (int half = kPartialSums / 2; half > 0; half /= 2) {
#pragma unroll
    for (int part = 0; part < half; ++part) sums[part] += sums[part + half];
  }
  return sums[0];
}

// Elements of a thread and round: partial sums times elements must fit into registers.
template <int kPartialSums>
constexpr int kReduceItems = kPartialSums <= 8 ? 4 : 1;

// The sums of the elements from `i` on, over all copies. All threads of a block call it together.
template <class Element, int kPartialSums>
__device__ Pack<Element, kReduceItems<kPartialSums>> reducePack(
    const Copies& copies, int64_t i, int64_t end, Decoder<typename ElementTraits<Element>::Compute>* decoders) {
  using Traits = ElementTraits<Element>;
  constexpr int kCount = kReduceItems<kPartialSums>;
  constexpr int kTile =
      kPartialSums < kMaxPartialSums ? 2 * kPartialSums : kMaxPartialSums;  // Fewer sums mean fewer copies.
  using Codes = Pack<uint8_t, kCount>;
  typename Traits::Compute sums[kCount][kPartialSums] = {};
  const auto divisor = static_cast<typename Traits::Compute>(copies.divisor);
  for (int64_t first = 0; first < copies.count; first += kMaxPartialSums) {
    if (copies.count > kMaxPartialSums) loadDecoders<Element>(copies, first, decoders);
    const uint8_t* codes = copies.rows.row(first) + kHeaderBytes + i;
    const bool aligned = isAligned<Codes>(codes) && copies.rows.distance % alignof(Codes) == 0;
#pragma unroll
    for (int offset = 0; offset < kTile; ++offset) {
      if (first + offset >= copies.count || i >= end) continue;
      const auto pack = loadPack<Codes>(codes + offset * copies.rows.distance, end - i, aligned);
      const auto& decoder = decoders[offset];
      // Rounded to the tensor's type first: the original decodes into a tensor before it adds.
      const auto add = [&](int item, typename Traits::Compute value) {
        sums[item][offset % kPartialSums] += Traits::load(Traits::store(value));
      };
      if (decoder.reciprocal != 0) {  // The same for all threads.
#pragma unroll
        for (int item = 0; item < kCount; ++item) add(item, decode(pack.items[item], decoder));
      } else {
#pragma unroll
        for (int item = 0; item < kCount; ++item) add(item, dequantize(pack.items[item], decoder.grid));
      }
    }
  }
  Pack<Element, kCount> result;
#pragma unroll
  for (int item = 0; item < kCount; ++item)
    result.items[item] = Traits::store(divide(sumOfPartialSums(sums[item]), divisor));
  return result;
}

template <class Element, int kPartialSums>
__global__ void __launch_bounds__(kThreads)
    reduceKernel(Copies copies, Feedback feedback, Cut cut, Split split, Element* __restrict__ mean,
                 Range<typename ElementTraits<Element>::Compute>* __restrict__ partials) {
  using T = typename ElementTraits<Element>::Compute;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  constexpr int kCount = kReduceItems<kPartialSums>;
  __shared__ typename BlockReduce::TempStorage scratch;
  __shared__ Decoder<T> decoders[kMaxPartialSums];
  const Item item(blockIdx.x, cut, split);
  const bool aligned = isAligned<Pack<Element, kCount>>(mean);
  const float* residual = residualsOf(feedback);
  if (copies.count <= kMaxPartialSums) loadDecoders<Element>(copies, 0, decoders);
  Range<T> mine = emptyRange<T>();
  for (int64_t round = item.begin; round < item.end; round += kThreads * kCount) {
    const int64_t i = round + threadIdx.x * kCount;
    const auto result = reducePack<Element, kPartialSums>(copies, i, item.end, decoders);
    storePack(mean + i, result, item.end - i, aligned);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (i + k >= item.end) continue;
      const T value =
          residual == nullptr ? ElementTraits<Element>::load(result.items[k]) : sumOf(result.items[k], residual[i + k]);
      mine = merge(mine, {value, value});
    }
  }
  const Range<T> all = BlockReduce(scratch).Reduce(mine, Merge{});
  if (threadIdx.x == 0) partials[blockIdx.x] = all;
}

}  // namespace

template <class Element>
cudaError_t mean(const Copies& copies, const Feedback& feedback, int64_t length, Element* output, void* workspace,
                 cudaStream_t stream) {
  const Cut cut = {length, 1, length};
  const Split split = splitOf(cut);
  auto* partials = static_cast<Range<typename ElementTraits<Element>::Compute>*>(workspace);
  const auto kernel = [&] {
    switch (partialSumCount(copies.count)) {
      case 2:
        return reduceKernel<Element, 2>;
      case 4:
        return reduceKernel<Element, 4>;
      case 8:
        return reduceKernel<Element, 8>;
      case 16:
        return reduceKernel<Element, 16>;
      default:
        return reduceKernel<Element, kMaxPartialSums>;
    }
  }();
  launchKernel(kernel, static_cast<unsigned>(split.parts), kThreads, stream, copies, feedback, cut, split, output,
               partials);
  return cudaGetLastError();
}

#define BAGUA_INSTANTIATE(Element) \
  template cudaError_t mean<Element>(const Copies&, const Feedback&, int64_t, Element*, void*, cudaStream_t);
BAGUA_INSTANTIATE(float)
BAGUA_INSTANTIATE(double)
BAGUA_INSTANTIATE(HalfBits)
BAGUA_INSTANTIATE(BFloat16Bits)
#undef BAGUA_INSTANTIATE

}  // namespace bagua::minmax_uint8::cuda
