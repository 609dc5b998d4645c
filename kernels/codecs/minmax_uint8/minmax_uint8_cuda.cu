// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda_common.cuh"
#include "kernels/launch.cuh"

// A chunk is spread over many blocks in two steps: every block reduces its part to a range, then every block merges the
// ranges of the whole chunk, which are few, and codes its part. Minimum and maximum do not depend on the order.
namespace bagua::minmax_uint8::cuda {
namespace {

// Parts are whole rounds of the block, which keeps the alignment of their chunk.
constexpr int64_t kPartMultiple = 8192;
// About two waves on a large device; more parts would cost more in merging their ranges than they gain.
constexpr int64_t kTargetBlocks = 2048;
constexpr int64_t kMaxParts = 1024;

template <class Element>
__device__ Range<typename ElementTraits<Element>::Compute> mergePack(
    Range<typename ElementTraits<Element>::Compute> range, const ElementPack<Element>& pack, int64_t left) {
#pragma unroll
  for (int i = 0; i < kItems<Element>; ++i) {
    if (i < left) {
      const auto value = ElementTraits<Element>::load(pack.items[i]);
      range = merge(range, {value, value});
    }
  }
  return range;
}

template <class Element>
__device__ Range<typename ElementTraits<Element>::Compute> rangeOfThread(const Element* x, int64_t begin, int64_t end) {
  constexpr int64_t kCount = kItems<Element>;
  constexpr int64_t kStep = kThreads * kCount;
  auto range = emptyRange<typename ElementTraits<Element>::Compute>();
  const bool aligned = isAligned<ElementPack<Element>>(x);
  int64_t i = begin + threadIdx.x * kCount;
  for (; i + (kUnroll - 1) * kStep + kCount <= end; i += kUnroll * kStep) {
    ElementPack<Element> packs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) packs[u] = loadPack<ElementPack<Element>>(x + i + u * kStep, kCount, aligned);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) range = mergePack<Element>(range, packs[u], kCount);
  }
  for (; i < end; i += kStep) {
    range = mergePack<Element>(range, loadPack<ElementPack<Element>>(x + i, end - i, aligned), end - i);
  }
  return range;
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    rangeKernel(const Element* __restrict__ input, Cut cut, Split split,
                Range<typename ElementTraits<Element>::Compute>* __restrict__ partials) {
  using T = typename ElementTraits<Element>::Compute;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  __shared__ typename BlockReduce::TempStorage scratch;
  for (int64_t index = blockIdx.x; index < cut.chunks * split.parts; index += gridDim.x) {
    const Item item(index, cut, split);
    const Range<T> mine = rangeOfThread(input + cut.begin(item.chunk), item.begin, item.end);
    const Range<T> all = BlockReduce(scratch).Reduce(mine, Merge{});
    if (threadIdx.x == 0) partials[index] = all;
    __syncthreads();  // Before the scratch is used again.
  }
}

template <class Element>
__device__ CodePack<Element> quantizePack(const ElementPack<Element>& pack,
                                          const Grid<typename ElementTraits<Element>::Compute>& grid) {
  CodePack<Element> codes;
#pragma unroll
  for (int i = 0; i < kItems<Element>; ++i) {
    codes.items[i] = grid.finite() ? quantize(ElementTraits<Element>::load(pack.items[i]), grid) : uint8_t{0};
  }
  return codes;
}

// kUnroll packs of the thread from element `first` on; all are loaded before the first is stored.
template <class Element, class Pack, class From, class To, class Convert>
__device__ void convertPacks(const From* from, To* to, int64_t first, int64_t end, bool alignedFrom, bool alignedTo,
                             const Convert& convert) {
  constexpr int64_t kStep = kThreads * kItems<Element>;
  Pack packs[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kStep;
    packs[u] = loadPack<Pack>(from + i, end - i, alignedFrom);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kStep;
    storePack(to + i, convert(packs[u]), end - i, alignedTo);
  }
}

// From the end to the beginning: the first step read the end last, so part of it is still in the cache.
template <class Element>
__device__ void quantizeItem(const Element* x, uint8_t* codes, const Item& item,
                             const Grid<typename ElementTraits<Element>::Compute>& grid) {
  using Pack = ElementPack<Element>;
  constexpr int64_t kCount = kItems<Element>;
  constexpr int64_t kRound = kUnroll * kThreads * kCount;
  const bool alignedX = isAligned<Pack>(x);
  const bool alignedCodes = isAligned<CodePack<Element>>(codes);
  const int64_t rounds = (item.end - item.begin + kRound - 1) / kRound;
  for (int64_t round = rounds - 1; round >= 0; --round) {
    const int64_t first = item.begin + round * kRound + threadIdx.x * kCount;
    convertPacks<Element, Pack>(x, codes, first, item.end, alignedX, alignedCodes,
                                [&grid](const Pack& pack) { return quantizePack<Element>(pack, grid); });
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    quantizeKernel(const Element* __restrict__ input, Cut cut, Split split,
                   const Range<typename ElementTraits<Element>::Compute>* __restrict__ partials,
                   PackedRows<uint8_t> rows) {
  using T = typename ElementTraits<Element>::Compute;
  using BlockReduce = cub::BlockReduce<Range<T>, kThreads>;
  __shared__ typename BlockReduce::TempStorage scratch;
  __shared__ Grid<T> grid;
  const int64_t items = cut.chunks * split.parts;
  for (int64_t index = items - 1 - blockIdx.x; index >= 0; index -= gridDim.x) {
    const Item item(index, cut, split);
    uint8_t* header = rows.row(item.chunk);
    const Range<T> mine = rangeOfPartials(partials + item.chunk * split.parts, split.parts);
    const Range<T> all = BlockReduce(scratch).Reduce(mine, Merge{});
    if (threadIdx.x == 0) {  // Only thread 0 holds the result of the block.
      const Range<T> range = headerRange(all, cut.size(item.chunk));
      if (item.part == 0) writeHeader<Element>(range, header);
      grid = makeGrid<Element>(range);
    }
    // It also ends this use of the scratch. The next grid waits for all threads in the next reduction.
    __syncthreads();
    uint8_t* codes = header + kHeaderBytes;
    quantizeItem(input + cut.begin(item.chunk), codes, item, grid);
    if (item.part == split.parts - 1) clearPadding(codes, cut.size(item.chunk), rows.rowBytes);
  }
}

template <class Element, bool kMultiplies>
__device__ ElementPack<Element> dequantizePack(const CodePack<Element>& codes,
                                               const Decoder<typename ElementTraits<Element>::Compute>& decoder) {
  using Traits = ElementTraits<Element>;
  ElementPack<Element> pack;
#pragma unroll
  for (int i = 0; i < kItems<Element>; ++i) {
    if constexpr (kMultiplies) {
      pack.items[i] = Traits::store(decode(codes.items[i], decoder));
    } else {
      const bool isFinite = decoder.grid.finite();
      pack.items[i] = isFinite ? Traits::store(dequantize(codes.items[i], decoder.grid)) : Traits::nan();
    }
  }
  return pack;
}

template <class Element, bool kMultiplies>
__device__ void dequantizeItem(const uint8_t* codes, Element* x, const Item& item,
                               const Decoder<typename ElementTraits<Element>::Compute>& decoder) {
  using Pack = CodePack<Element>;
  constexpr int64_t kCount = kItems<Element>;
  constexpr int64_t kRound = kUnroll * kThreads * kCount;
  const bool alignedX = isAligned<ElementPack<Element>>(x);
  const bool alignedCodes = isAligned<Pack>(codes);
  for (int64_t first = item.begin + threadIdx.x * kCount; first < item.end; first += kRound) {
    convertPacks<Element, Pack>(codes, x, first, item.end, alignedCodes, alignedX, [&decoder](const Pack& pack) {
      return dequantizePack<Element, kMultiplies>(pack, decoder);
    });
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    dequantizeKernel(PackedRows<const uint8_t> rows, Cut cut, Split split, Element* __restrict__ output) {
  for (int64_t index = blockIdx.x; index < cut.chunks * split.parts; index += gridDim.x) {
    const Item item(index, cut, split);
    const uint8_t* header = rows.row(item.chunk);
    const uint8_t* codes = header + kHeaderBytes;
    const auto decoder = makeDecoder(makeGrid<Element>(readHeader<Element>(header)));
    Element* x = output + cut.begin(item.chunk);
    // All threads of a block decide alike.
    if (decoder.grid.finite() && decoder.reciprocal != 0) {
      dequantizeItem<Element, true>(codes, x, item, decoder);
    } else {
      dequantizeItem<Element, false>(codes, x, item, decoder);
    }
  }
}

}  // namespace

Split splitOf(const Cut& cut) {
  const int64_t wanted =
      std::min((cut.stride + kPartMultiple - 1) / kPartMultiple, (kTargetBlocks + cut.chunks - 1) / cut.chunks);
  const int64_t parts = std::clamp<int64_t>(wanted, 1, kMaxParts);
  const int64_t partLength = roundUp(std::max<int64_t>(1, (cut.stride + parts - 1) / parts), kPartMultiple);
  return {parts, partLength};
}

template <class Element>
cudaError_t findRanges(const Element* input, const Feedback& feedback, const Cut& cut, void* workspace,
                       cudaStream_t stream) {
  const Split split = splitOf(cut);
  auto* partials = static_cast<Range<typename ElementTraits<Element>::Compute>*>(workspace);
  if (feedback.residual != nullptr) {
    launchRangesOfSums(input, feedback, cut, split, partials, stream);
  } else {
    launchKernel(rangeKernel<Element>, gridBlocks(cut, split), kThreads, stream, input, cut, split, partials);
  }
  return cudaGetLastError();
}

template <class Element>
cudaError_t encode(const Element* input, const Feedback& feedback, const Cut& cut, const void* workspace,
                   const PackedRows<uint8_t>& rows, cudaStream_t stream) {
  const Split split = splitOf(cut);
  const auto* partials = static_cast<const Range<typename ElementTraits<Element>::Compute>*>(workspace);
  if (feedback.residual != nullptr) {
    launchQuantizeSums(input, feedback, cut, split, partials, rows, stream);
  } else {
    launchKernel(quantizeKernel<Element>, gridBlocks(cut, split), kThreads, stream, input, cut, split, partials, rows);
  }
  return cudaGetLastError();
}

template <class Element>
cudaError_t decode(const PackedRows<const uint8_t>& rows, const Cut& cut, Element* output, cudaStream_t stream) {
  if (cut.length == 0) return cudaSuccess;
  // Nothing is merged here, so parts are as small as they come.
  const Split split = {std::max<int64_t>(1, (cut.stride + kPartMultiple - 1) / kPartMultiple), kPartMultiple};
  launchKernel(dequantizeKernel<Element>, gridBlocks(cut, split), kThreads, stream, rows, cut, split, output);
  return cudaGetLastError();
}

#define BAGUA_INSTANTIATE(Element)                                                                            \
  template cudaError_t findRanges<Element>(const Element*, const Feedback&, const Cut&, void*, cudaStream_t); \
  template cudaError_t encode<Element>(const Element*, const Feedback&, const Cut&, const void*,              \
                                       const PackedRows<uint8_t>&, cudaStream_t);                             \
  template cudaError_t decode<Element>(const PackedRows<const uint8_t>&, const Cut&, Element*, cudaStream_t);
BAGUA_INSTANTIATE(float)
BAGUA_INSTANTIATE(double)
BAGUA_INSTANTIATE(HalfBits)
BAGUA_INSTANTIATE(BFloat16Bits)
#undef BAGUA_INSTANTIATE

}  // namespace bagua::minmax_uint8::cuda
