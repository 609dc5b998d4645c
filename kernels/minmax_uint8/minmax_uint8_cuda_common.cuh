// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "kernels/minmax_uint8/minmax_uint8_cuda.h"
#include "kernels/minmax_uint8/minmax_uint8_decoder.h"

// What the CUDA sources share: how a thread moves elements and how a block finds its share.
namespace bagua::minmax_uint8::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kUnroll = 4;                   // Independent loads in flight per thread.
inline constexpr int64_t kMaxGridBlocks = 1 << 20;  // Beyond, blocks take several items.

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

  __device__ Item(int64_t index, const Layout& layout, const Split& split)
      : chunk(index / split.parts), part(index % split.parts) {
    const int64_t size = layout.size(chunk);
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
__device__ inline void clearPadding(uint8_t* codes, const Item& item, const Layout& layout) {
  const int64_t padded = layout.packedStride() - kHeaderBytes;
  for (int64_t i = layout.size(item.chunk) + threadIdx.x; i < padded; i += kThreads) codes[i] = 0;
}

inline unsigned gridBlocks(const Layout& layout, const Split& split) {
  return static_cast<unsigned>(std::min(layout.chunks * split.parts, kMaxGridBlocks));
}

// The second step: codes every chunk by the ranges of its parts, of which rangeKernel or reduceKernel left
// layout.chunks * split.parts in `partials`.
template <class Element>
void launchQuantize(const Element* input, const Layout& layout, const Split& split,
                    const Range<typename ElementTraits<Element>::Compute>* partials, uint8_t* packed,
                    cudaStream_t stream);

}  // namespace bagua::minmax_uint8::cuda
