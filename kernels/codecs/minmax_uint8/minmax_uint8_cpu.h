// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/codecs/minmax_uint8/minmax_uint8_kernels.h"

namespace bagua {
struct Piece;
}

// The codec on CPU memory. No pointer needs an alignment beyond its element's.
namespace bagua::minmax_uint8::cpu {

// One block of the copies that reduceAndCompress adds. Codes may be read up to the next multiple of 32 past the block's
// end, which the padding of a chunk allows.
template <class T>
struct ReduceSource {
  const uint8_t* codes;  // Of copy 0.
  int64_t copyStride;    // Bytes from a copy's codes to the next copy's.
  int64_t copies;
  const Grid<T>* grids;  // One per copy.
  T divisor;
};

// The loops over elements, one set for each instruction set; all sets give the same bits. `bypassCache`: the output is
// too large to be found in a cache later, so stores need not read it into one.
template <class Element>
struct ElementLoops {
  using T = ElementTraits<Element>::Compute;

  Range<T> (*range)(const Element* x, int64_t count);
  void (*quantize)(const Element* x, uint8_t* codes, int64_t count, const Grid<T>& grid, bool bypassCache);
  void (*dequantize)(const uint8_t* codes, Element* x, int64_t count, const Grid<T>& grid, bool bypassCache);
  void (*reduce)(const ReduceSource<T>& source, Element* x, int64_t count);
  // As range and quantize, of x + residual.
  Range<T> (*rangeOfSum)(const Element* x, const float* residual, int64_t count);
  void (*quantizeSum)(const Element* x, const Feedback& feedback, uint8_t* codes, int64_t count, const Grid<T>& grid);
  // Adds decoded values, rounded to Element, to `sums`.
  void (*add)(const uint8_t* codes, T* sums, int64_t count, const Grid<T>& grid);
};

struct Loops {
  const char* name;
  ElementLoops<float> ofFloat;
  ElementLoops<double> ofDouble;
  ElementLoops<HalfBits> ofHalf;
  ElementLoops<BFloat16Bits> ofBFloat16;

  template <class Element>
  const ElementLoops<Element>& of() const;
};

template <>
inline const ElementLoops<float>& Loops::of<float>() const {
  return ofFloat;
}
template <>
inline const ElementLoops<double>& Loops::of<double>() const {
  return ofDouble;
}
template <>
inline const ElementLoops<HalfBits>& Loops::of<HalfBits>() const {
  return ofHalf;
}
template <>
inline const ElementLoops<BFloat16Bits>& Loops::of<BFloat16Bits>() const {
  return ofBFloat16;
}

// The sets that this machine can run, the plain one first and the fastest last.
const std::vector<const Loops*>& availableLoops();
inline const Loops& bestLoops() { return *availableLoops().back(); }

// Shared out over the intra-op threads of torch; the result does not depend on their number. `feedback` and `residual`
// are null where there is no error feedback.
template <class Element>
void compress(const Loops& loops, const Element* input, const Layout& layout, const Feedback* feedback,
              uint8_t* packed);

template <class Element>
void decompress(const Loops& loops, const uint8_t* packed, const Layout& layout, Element* output);

// As bagua::minmax_uint8::reduceAndCompress; `layout` is that of one chunk, `sum` has room for its elements.
template <class Element>
void reduceAndCompress(const Loops& loops, const Received& received, const Layout& layout, Element* sum,
                       uint8_t* packed);

// One chunk piece by piece: as Codec has it, the piece of values of Element, or of a mean of them.
template <class Element>
void startChunk(const Loops& loops, const Element* x, const float* residual, int64_t count, uint8_t* packed,
                int64_t packedStride);

// The range of values of Element, or of their sums with residuals, is exact in double.
template <class Element>
void startChunk(const Range<double>& range, int64_t count, uint8_t* packed, int64_t packedStride);

template <class Element>
void compressPiece(const Loops& loops, const Element* x, const Piece& piece, const Feedback* feedback, uint8_t* packed);

template <class Element>
void decompressPiece(const Loops& loops, const uint8_t* packed, const Piece& piece, Element* x);

// Adds decoded values, rounded to Element, to `sums`, whose first belongs to the first of the piece.
template <class Element>
void addPiece(const Loops& loops, const uint8_t* packed, const Piece& piece,
              typename ElementTraits<Element>::Compute* sums);

// Returns the range of the sums, or of their sums with `residual`.
template <class Element>
Range<double> reducePiece(const Loops& loops, const Received& received, int64_t packedStride, const Piece& piece,
                          const float* residual, Element* sum);

}  // namespace bagua::minmax_uint8::cpu
