// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "kernels/codec.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_loops.h"
#include "kernels/processor.h"
#include "kernels/share_out.h"

namespace bagua::minmax_uint8::cpu {
namespace {

// Elements that one thread takes at a time: enough to outweigh waking it.
constexpr int64_t kBlock = 16384;

// Elements of a step of a second pass over a chunk. Smaller steps would cost the processor's prefetching more than they
// gain.
constexpr int64_t kSegment = int64_t{1024} * 1024;

// A pass that moves more bytes than this writes past the caches: what they hold is more likely needed soon.
constexpr int64_t kCacheBytes = int64_t{16} * 1024 * 1024;

template <class Element>
bool bypassesCache(int64_t count) {
  return count * static_cast<int64_t>(sizeof(Element) + sizeof(uint8_t)) > kCacheBytes;
}

void clearPadding(uint8_t* codes, int64_t count, int64_t packedStride) {
  std::memset(codes + count, 0, static_cast<size_t>(packedStride - kHeaderBytes - count));
}

// Calls f(begin, end) from the last segment to the first: what the pass before read last is still in a cache.
template <class F>
void forSegmentsBackwards(int64_t count, const F& f) {
  for (int64_t end = count; end > 0;) {
    const int64_t begin = (end - 1) / kSegment * kSegment;
    f(begin, end);
    end = begin;
  }
}

// The second pass over a chunk or a part of it.
template <class Element>
void quantizeBackwards(const ElementLoops<Element>& loops, const Element* x, int64_t count,
                       const Grid<typename ElementLoops<Element>::T>& grid, bool bypassCache, uint8_t* codes) {
  if (!grid.finite()) {
    std::memset(codes, 0, static_cast<size_t>(count));
    return;
  }
  forSegmentsBackwards(count, [&](int64_t begin, int64_t end) {
    loops.quantize(x + begin, codes + begin, end - begin, grid, bypassCache);
  });
}

template <class Element>
void quantizeSumsBackwards(const ElementLoops<Element>& loops, const Element* x, const Feedback& feedback,
                           int64_t count, const Grid<typename ElementLoops<Element>::T>& grid, uint8_t* codes) {
  if (!grid.finite()) {
    std::memset(codes, 0, static_cast<size_t>(count));
    std::memmove(feedback.next, feedback.residual, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  forSegmentsBackwards(count, [&](int64_t begin, int64_t end) {
    loops.quantizeSum(x + begin, feedback.from(begin), codes + begin, end - begin, grid);
  });
}

// Splits `count` elements over the threads; f(begin, end) takes whole blocks.
template <class F>
void forBlocks(int64_t count, const F& f) {
  shareOut((count + kBlock - 1) / kBlock, 1,
           [&](int64_t first, int64_t last) { f(first * kBlock, std::min(last * kBlock, count)); });
}

// rangeOf(begin, end) may make the elements while it looks at them.
template <class T, class RangeOf>
Range<T> rangeOfBlocks(int64_t count, const RangeOf& rangeOf) {
  std::mutex mutex;
  Range<T> range = emptyRange<T>();
  forBlocks(count, [&](int64_t begin, int64_t end) {
    const Range<T> part = rangeOf(begin, end);
    const std::lock_guard<std::mutex> lock(mutex);
    range = merge(range, part);
  });
  return range;
}

// The header and the padding of a chunk with elements of this range.
template <class Element>
Grid<typename ElementLoops<Element>::T> writeFrame(Range<typename ElementLoops<Element>::T> range, int64_t count,
                                                   int64_t packedStride, uint8_t* packed) {
  const auto header = storedRange<Element>(headerRange(range, count));
  writeHeader<Element>(header, packed);
  clearPadding(packed + kHeaderBytes, count, packedStride);
  return makeGrid<Element>(header);
}

template <class Element, class RangeOf>
void compressChunk(const ElementLoops<Element>& loops, const Element* x, int64_t count, int64_t packedStride,
                   const Feedback* feedback, uint8_t* packed, const RangeOf& rangeOf) {
  using T = ElementLoops<Element>::T;
  const auto grid = writeFrame<Element>(rangeOfBlocks<T>(count, rangeOf), count, packedStride, packed);
  uint8_t* codes = packed + kHeaderBytes;
  const bool bypassCache = bypassesCache<Element>(count);
  forBlocks(count, [&](int64_t begin, int64_t end) {
    const int64_t size = end - begin;
    if (feedback != nullptr) {
      quantizeSumsBackwards(loops, x + begin, feedback->from(begin), size, grid, codes + begin);
    } else {
      quantizeBackwards(loops, x + begin, size, grid, bypassCache, codes + begin);
    }
  });
}

template <class Element>
void decodeBlock(const ElementLoops<Element>& loops, const uint8_t* codes, Element* x, int64_t count,
                 const Grid<typename ElementLoops<Element>::T>& grid, bool bypassCache) {
  if (grid.finite()) {
    loops.dequantize(codes, x, count, grid, bypassCache);
  } else {
    std::fill(x, x + count, ElementTraits<Element>::nan());
  }
}

// One grid per copy.
template <class Element>
std::vector<Grid<typename ElementLoops<Element>::T>> gridsOf(const Received& received, int64_t packedStride) {
  std::vector<Grid<typename ElementLoops<Element>::T>> grids;
  grids.reserve(static_cast<size_t>(received.copies));
  for (int64_t copy = 0; copy < received.copies; ++copy) {
    grids.push_back(makeGrid<Element>(readHeader<Element>(received.packed + copy * packedStride)));
  }
  return grids;
}

template <class Element>
Range<typename ElementLoops<Element>::T> rangeOf(const ElementLoops<Element>& loops, const Element* x,
                                                 const float* residual, int64_t begin, int64_t end) {
  if (residual == nullptr) return loops.range(x + begin, end - begin);
  return loops.rangeOfSum(x + begin, residual + begin, end - begin);
}

// Adds elements [begin, end) of the copies and returns the range of the result, a block at a time.
template <class Element>
Range<typename ElementLoops<Element>::T> reduceBlocks(const ElementLoops<Element>& loops, const Received& received,
                                                      int64_t packedStride,
                                                      const Grid<typename ElementLoops<Element>::T>* grids,
                                                      int64_t begin, int64_t end, const float* residual, Element* sum) {
  using T = ElementLoops<Element>::T;
  Range<T> range = emptyRange<T>();
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    const ReduceSource<T> source = {received.packed + kHeaderBytes + first, packedStride, received.copies, grids,
                                    static_cast<T>(received.divisor)};
    loops.reduce(source, sum + first, count);
    range = merge(range, rangeOf(loops, sum, residual, first, first + count));
  }
  return range;
}

// Chunks go to threads whole, which keeps a small one in that thread's cache, unless there are too few to share out.
template <class F>
void forChunks(const Layout& layout, const F& f) {
  const int64_t threads = at::get_num_threads();
  if (layout.chunks < threads && layout.stride > kBlock) {
    for (int64_t chunk = 0; chunk < layout.chunks; ++chunk) f(chunk);
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, layout.stride));
  shareOut(layout.chunks, grain, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) f(chunk);
  });
}

}  // namespace

const std::vector<const Loops*>& availableLoops() {
  static const std::vector<const Loops*> kAvailable = [] {
    std::vector<const Loops*> available = {&scalarLoops()};
#if defined(__x86_64__)
    if (hasAvx2()) available.push_back(&avx2Loops());
    if (hasAvx512()) available.push_back(&avx512Loops());
#endif
    return available;
  }();
  return kAvailable;
}

template <class Element>
void compress(const Loops& loops, const Element* input, const Layout& layout, const Feedback* feedback,
              uint8_t* packed) {
  const ElementLoops<Element>& elementLoops = loops.of<Element>();
  forChunks(layout, [&](int64_t chunk) {
    const Element* x = input + layout.begin(chunk);
    const Feedback part = feedback == nullptr ? Feedback{} : feedback->from(layout.begin(chunk));
    compressChunk(elementLoops, x, layout.size(chunk), layout.packedStride(), feedback == nullptr ? nullptr : &part,
                  packed + chunk * layout.packedStride(),
                  [&](int64_t begin, int64_t end) { return rangeOf(elementLoops, x, part.residual, begin, end); });
  });
}

template <class Element>
void decompress(const Loops& loops, const uint8_t* packed, const Layout& layout, Element* output) {
  const ElementLoops<Element>& elementLoops = loops.of<Element>();
  const bool bypassCache = bypassesCache<Element>(layout.length);
  forChunks(layout, [&](int64_t chunk) {
    const uint8_t* header = packed + chunk * layout.packedStride();
    const auto grid = makeGrid<Element>(readHeader<Element>(header));
    Element* x = output + layout.begin(chunk);
    forBlocks(layout.size(chunk), [&](int64_t begin, int64_t end) {
      decodeBlock(elementLoops, header + kHeaderBytes + begin, x + begin, end - begin, grid, bypassCache);
    });
  });
}

template <class Element>
void reduceAndCompress(const Loops& loops, const Received& received, const Layout& layout, Element* sum,
                       uint8_t* packed) {
  const ElementLoops<Element>& elementLoops = loops.of<Element>();
  const auto grids = gridsOf<Element>(received, layout.packedStride());
  const auto reduce = [&](int64_t begin, int64_t end) {
    return reduceBlocks(elementLoops, received, layout.packedStride(), grids.data(), begin, end, nullptr, sum);
  };
  compressChunk(elementLoops, sum, layout.length, layout.packedStride(), nullptr, packed, reduce);
}

// NOLINTNEXTLINE(readability-function-size): one parameter more, which most callers leave out.
template <class Element>
void startChunk(const Loops& loops, const Element* x, const float* residual, int64_t count, uint8_t* packed,
                int64_t packedStride) {
  using T = ElementLoops<Element>::T;
  const auto range = rangeOfBlocks<T>(
      count, [&](int64_t begin, int64_t end) { return rangeOf(loops.of<Element>(), x, residual, begin, end); });
  writeFrame<Element>(range, count, packedStride, packed);
}

template <class Element>
void startChunk(const Range<double>& range, int64_t count, uint8_t* packed, int64_t packedStride) {
  using T = ElementLoops<Element>::T;
  writeFrame<Element>({static_cast<T>(range.low), static_cast<T>(range.high)}, count, packedStride, packed);
}

template <class Element>
void compressPiece(const Loops& loops, const Element* x, const Piece& piece, const Feedback* feedback,
                   uint8_t* packed) {
  const ElementLoops<Element>& elementLoops = loops.of<Element>();
  const auto grid = makeGrid<Element>(readHeader<Element>(packed));
  forBlocks(piece.end - piece.begin, [&](int64_t begin, int64_t end) {
    const int64_t first = piece.begin + begin;
    uint8_t* codes = packed + kHeaderBytes + first;
    if (feedback != nullptr) {
      quantizeSumsBackwards(elementLoops, x + first, feedback->from(first), end - begin, grid, codes);
    } else {
      quantizeBackwards(elementLoops, x + first, end - begin, grid, false, codes);
    }
  });
}

template <class Element>
void decompressPiece(const Loops& loops, const uint8_t* packed, const Piece& piece, Element* x) {
  const ElementLoops<Element>& elementLoops = loops.of<Element>();
  const auto grid = makeGrid<Element>(readHeader<Element>(packed));
  forBlocks(piece.end - piece.begin, [&](int64_t begin, int64_t end) {
    decodeBlock(elementLoops, packed + kHeaderBytes + piece.begin + begin, x + piece.begin + begin, end - begin, grid,
                false);
  });
}

template <class Element>
void addPiece(const Loops& loops, const uint8_t* packed, const Piece& piece,
              typename ElementTraits<Element>::Compute* sums) {
  using T = ElementTraits<Element>::Compute;
  const ElementLoops<Element>& elementLoops = loops.of<Element>();
  const auto grid = makeGrid<Element>(readHeader<Element>(packed));
  forBlocks(piece.end - piece.begin, [&](int64_t begin, int64_t end) {
    if (!grid.finite()) return std::fill(sums + begin, sums + end, ElementTraits<T>::nan());
    elementLoops.add(packed + kHeaderBytes + piece.begin + begin, sums + begin, end - begin, grid);
  });
}

// NOLINTNEXTLINE(readability-function-size): one parameter more, which most callers leave out.
template <class Element>
Range<double> reducePiece(const Loops& loops, const Received& received, int64_t packedStride, const Piece& piece,
                          const float* residual, Element* sum) {
  using T = ElementLoops<Element>::T;
  const ElementLoops<Element>& elementLoops = loops.of<Element>();
  const auto grids = gridsOf<Element>(received, packedStride);
  const Range<T> range = rangeOfBlocks<T>(piece.end - piece.begin, [&](int64_t begin, int64_t end) {
    return reduceBlocks(elementLoops, received, packedStride, grids.data(), piece.begin + begin, piece.begin + end,
                        residual, sum);
  });
  return {range.low, range.high};
}

// NOLINTBEGIN(bugprone-macro-parentheses): the argument is a type.
#define BAGUA_INSTANTIATE(Element)                                                                                \
  template void compress<Element>(const Loops&, const Element*, const Layout&, const Feedback*, uint8_t*);        \
  template void decompress<Element>(const Loops&, const uint8_t*, const Layout&, Element*);                       \
  template void reduceAndCompress<Element>(const Loops&, const Received&, const Layout&, Element*, uint8_t*);     \
  template void startChunk<Element>(const Loops&, const Element*, const float*, int64_t, uint8_t*, int64_t);      \
  template void startChunk<Element>(const Range<double>&, int64_t, uint8_t*, int64_t);                            \
  template void compressPiece<Element>(const Loops&, const Element*, const Piece&, const Feedback*, uint8_t*);    \
  template void decompressPiece<Element>(const Loops&, const uint8_t*, const Piece&, Element*);                   \
  template void addPiece<Element>(const Loops&, const uint8_t*, const Piece&, ElementTraits<Element>::Compute*);  \
  template Range<double> reducePiece<Element>(const Loops&, const Received&, int64_t, const Piece&, const float*, \
                                              Element*);
// NOLINTEND(bugprone-macro-parentheses)
BAGUA_INSTANTIATE(float)
BAGUA_INSTANTIATE(double)
BAGUA_INSTANTIATE(HalfBits)
BAGUA_INSTANTIATE(BFloat16Bits)
#undef BAGUA_INSTANTIATE

}  // namespace bagua::minmax_uint8::cpu
