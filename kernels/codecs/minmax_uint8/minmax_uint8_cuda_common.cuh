// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_decoder.h"

// Where there are more items, blocks take several. Tests on the CPU have another number.
#if !defined(BAGUA_MOST_GRID_BLOCKS)
#define BAGUA_MOST_GRID_BLOCKS (int64_t{1} << 20)
#endif

// What the CUDA sources share: how a thread moves elements and how a block finds its share.
namespace bagua::minmax_uint8::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kUnroll = 4;  // Independent loads in flight per thread.

// Elements that a thread moves at once: a 16-byte load, and at least a 4-byte store of codes.
template <class Element>
constexpr int kItems = sizeof(Element) == 2 ? 8 : 4;

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount < 16 ? sizeof(Element) * kCount : 16) Pack {
  Element items[kCount];
};

template <class Element>
using ElementPack = Pack<Element, kItems<Element>>;
template <class Element>
using CodePack = Pack<uint8_t, kItems<Element>>;

template <class P>
__device__ bool isAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(P) == 0;
}

template <class P, class Item>
__device__ P loadPack(const Item* from, int64_t left, bool aligned) {
  constexpr int kCount = sizeof(P) / sizeof(Item);
  if (aligned && left >= kCount) return *reinterpret_cast<const P*>(from);
  P pack = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < left) pack.items[i] = from[i];
  }
  return pack;
}

template <class P, class Item>
__device__ void storePack(Item* to, const P& pack, int64_t left, bool aligned) {
  constexpr int kCount = sizeof(P) / sizeof(Item);
  if (aligned && left >= kCount) {
    *reinterpret_cast<P*>(to) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < left) to[i] = pack.items[i];
  }
}

struct Merge {
  template <class T>
  __device__ Range<T> operator()(Range<T> a, Range<T> b) const {
    return merge(a, b);
  }
};

// One block's share: elements [begin, end) of a chunk.
struct Item {
  int64_t chunk;
  int64_t part;
  int64_t begin;
  int64_t end;

  __device__ Item(int64_t index, const Cut& cut, const Split& split)
      : chunk(index / split.parts), part(index % split.parts) {
    const int64_t size = cut.size(chunk);
    begin = part * split.partLength < size ? part * split.partLength : size;
    end = size - begin < split.partLength ? size : begin + split.partLength;
  }
};

template <class T>
__device__ Range<T> rangeOfPartials(const Range<T>* partials, int64_t parts) {
  Range<T> range = emptyRange<T>();
  for (int64_t i = threadIdx.x; i < parts; i += kThreads) range = merge(range, partials[i]);
  return range;
}

// The zeros after the codes of a chunk.
__device__ inline void clearPadding(uint8_t* codes, int64_t size, int64_t rowBytes) {
  for (int64_t i = size + threadIdx.x; i < rowBytes - kHeaderBytes; i += kThreads) codes[i] = 0;
}

inline unsigned gridBlocks(const Cut& cut, const Split& split) {
  return static_cast<unsigned>(std::min<int64_t>(cut.chunks * split.parts, BAGUA_MOST_GRID_BLOCKS));
}

// Where the residuals that count are.
__device__ inline const float* residualsOf(const Feedback& feedback) {
  return feedback.wasLost != nullptr && *feedback.wasLost ? feedback.next : feedback.residual;
}

// The two steps of coding with error feedback, in minmax_uint8_cuda_feedback.cu.
template <class Element>
void launchRangesOfSums(const Element* input, const Feedback& feedback, const Cut& cut, const Split& split,
                        Range<typename ElementTraits<Element>::Compute>* partials, cudaStream_t stream);
template <class Element>
void launchQuantizeSums(const Element* input, const Feedback& feedback, const Cut& cut, const Split& split,
                        const Range<typename ElementTraits<Element>::Compute>* partials,
                        const PackedRows<uint8_t>& rows, cudaStream_t stream);

}  // namespace bagua::minmax_uint8::cuda
