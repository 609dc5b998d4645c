// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/elements.h"
#include "kernels/packed_rows.h"

// The arithmetic of the codec, shared by the scalar, the vector and the CUDA code, which therefore agree bit for bit.
// No expression here multiplies and adds, so contraction to fused multiply-add cannot change a result.
namespace bagua::minmax_uint8 {

inline constexpr int64_t kHeaderBytes = 32;
inline constexpr int64_t kAlignment = 32;
inline constexpr int64_t kMaxPartialSums = 32;

BAGUA_HOST_DEVICE int64_t roundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Where the chunks of a tensor lie, in elements and in packed bytes that have no gaps.
struct Layout : Cut {
  BAGUA_HOST_DEVICE int64_t packedStride() const { return kHeaderBytes + roundUp(stride, kAlignment); }
};

template <class T>
BAGUA_HOST_DEVICE T roundHalfToEven(T x) {
#if defined(__CUDA_ARCH__)
  return rint(x);
#else
  if constexpr (sizeof(T) == sizeof(float)) {
    return __builtin_rintf(x);
  } else {
    return __builtin_rint(x);
  }
#endif
}

// Correctly rounded even where the compiler was told to use fast divisions.
template <class T>
BAGUA_HOST_DEVICE T divide(T x, T y) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) {
    return __fdiv_rn(x, y);
  } else {
    return __ddiv_rn(x, y);
  }
#else
  return x / y;
#endif
}

template <class T>
BAGUA_HOST_DEVICE bool isFinite(T x) {
  const T zero = x - x;
  return zero == zero;
}

template <class T>
struct Range {
  T low;
  T high;
};

// Starts a reduction with merge().
template <class T>
BAGUA_HOST_DEVICE Range<T> emptyRange() {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  return {kInfinity, -kInfinity};
}

// A NaN on either side stays: a comparison alone would drop it, and with it the overflow that GradScaler looks for.
template <class T>
BAGUA_HOST_DEVICE Range<T> merge(Range<T> a, Range<T> b) {
  return {(b.low < a.low || b.low != b.low) ? b.low : a.low, (b.high > a.high || b.high != b.high) ? b.high : a.high};
}

// What the header holds for a chunk with this range: NaN twice if a value was not finite, and never a negative zero,
// which minimum and maximum would yield or not depending on the order of the elements.
template <class T>
BAGUA_HOST_DEVICE Range<T> headerRange(Range<T> range, int64_t count) {
  if (count == 0) return {T{0}, T{0}};
  if (!isFinite(range.low) || !isFinite(range.high)) return {ElementTraits<T>::nan(), ElementTraits<T>::nan()};
  return {range.low + T{0}, range.high + T{0}};
}

// The range as a decoder will find it in the header: rounded to the tensor's type. Only error feedback makes values
// between the numbers of a type, or beyond its largest.
template <class Element>
BAGUA_HOST_DEVICE Range<typename ElementTraits<Element>::Compute> storedRange(
    Range<typename ElementTraits<Element>::Compute> range) {
  using Traits = ElementTraits<Element>;
  using T = Traits::Compute;
  constexpr T kMax = Traits::kMaxFinite;
  const T low = range.low < -kMax ? -kMax : range.low;  // Comparisons that let a NaN pass.
  const T high = range.high > kMax ? kMax : range.high;
  return {Traits::load(Traits::store(low)) + T{0}, Traits::load(Traits::store(high)) + T{0}};
}

template <class Element>
BAGUA_HOST_DEVICE void writeHeader(Range<typename ElementTraits<Element>::Compute> range, uint8_t* header) {
  using Traits = ElementTraits<Element>;
  // Stored without conversion: a converted NaN has different bits on different devices.
  const bool finite = range.low == range.low;
  const Element values[2] = {finite ? Traits::store(range.low) : Traits::nan(),
                             finite ? Traits::store(range.high) : Traits::nan()};
  static_assert(sizeof(values) <= kHeaderBytes);
  memset(header, 0, kHeaderBytes);
  memcpy(header, values, sizeof(values));
}

template <class Element>
BAGUA_HOST_DEVICE Range<typename ElementTraits<Element>::Compute> readHeader(const uint8_t* header) {
  Element values[2];
  memcpy(values, header, sizeof(values));
  return {ElementTraits<Element>::load(values[0]), ElementTraits<Element>::load(values[1])};
}

// The 256 values of a chunk: code q stands for base + (q + lower) / scale, kept within [floor, ceiling].
template <class T>
struct Grid {
  T base;
  T scale;
  T lower;
  T upper;
  T floor;
  T ceiling;

  BAGUA_HOST_DEVICE bool finite() const { return base == base; }
};

// The original's grid has base 0: multiples of 1 / scale, with zero among them.
template <class T>
BAGUA_HOST_DEVICE T gridScale(Range<T> range) {
  const T span = range.high - range.low;
  if (isFinite(span)) return divide(T{255}, span + static_cast<T>(1e-7));
  return divide(static_cast<T>(127.5), range.high * static_cast<T>(0.5) - range.low * static_cast<T>(0.5));
}

// A pure function of the header, so encoder and decoder cannot disagree. Departs from the original in that
//  - a range that is not finite (or, from a damaged packet, not in order) yields a grid of NaN,
//  - a constant other than zero is its own grid and decodes to itself,
//  - where upper - 255 cannot be represented, codes count from the minimum and cannot wrap,
//  - a span that overflows is halved first, and no finite chunk decodes to infinity.
template <class Element>
BAGUA_HOST_DEVICE Grid<typename ElementTraits<Element>::Compute> makeGrid(
    Range<typename ElementTraits<Element>::Compute> range) {
  using T = ElementTraits<Element>::Compute;
  constexpr T kMax = ElementTraits<Element>::kMaxFinite;
  if (!isFinite(range.low) || !isFinite(range.high) || !(range.low <= range.high)) {
    return {ElementTraits<T>::nan(), T{1}, T{0}, T{255}, -kMax, kMax};
  }
  if (range.low == range.high && range.low != T{0}) return {range.low, T{1}, T{0}, T{255}, range.low, range.low};
  const T scale = gridScale(range);
  const T upper = roundHalfToEven(range.high * scale);
  const T lower = upper - T{255};
  if (!(upper - lower == T{255})) {
    return {range.low, divide(T{255}, range.high - range.low), T{0}, T{255}, range.low, range.high};
  }
  return {T{0}, scale, lower, upper, -kMax, kMax};
}

// Only for a finite grid.
template <class T>
BAGUA_HOST_DEVICE uint8_t quantize(T x, const Grid<T>& grid) {
  const T level = roundHalfToEven((x - grid.base) * grid.scale);
  const T code = (level < grid.upper ? level : grid.upper) - grid.lower;
  return static_cast<uint8_t>(code > T{0} ? static_cast<int>(code) : 0);
}

template <class T>
BAGUA_HOST_DEVICE T valueAt(T quotient, const Grid<T>& grid) {
  const T value = grid.base + quotient;
  const T bounded = value > grid.ceiling ? grid.ceiling : value;  // Comparisons that let a NaN pass.
  return bounded < grid.floor ? grid.floor : bounded;
}

template <class T>
BAGUA_HOST_DEVICE T dequantize(uint8_t code, const Grid<T>& grid) {
  return valueAt(divide(static_cast<T>(code) + grid.lower, grid.scale), grid);
}

// Error feedback: h = x + residual is coded, and what is left of h without what it decodes to is the next residual.
// Both may be one array.
struct Feedback {
  float* residual;
  float* next;
  // As Encoding has it. Only kernels look at it, on the CPU Encoding::restoreIfLost() has been called.
  const bool* wasLost = nullptr;

  [[nodiscard]] BAGUA_HOST_DEVICE Feedback from(int64_t element) const {
    return {residual + element, next + element, wasLost};
  }
};

template <class Element>
BAGUA_HOST_DEVICE typename ElementTraits<Element>::Compute sumOf(Element x, float residual) {
  using T = ElementTraits<Element>::Compute;
  return ElementTraits<Element>::load(x) + static_cast<T>(residual);
}

struct CodedSum {
  uint8_t code;
  float residual;
};

// Only for a finite grid.
template <class Element>
BAGUA_HOST_DEVICE CodedSum codeSum(Element x, float residual,
                                   const Grid<typename ElementTraits<Element>::Compute>& grid) {
  using Traits = ElementTraits<Element>;
  using T = Traits::Compute;
  constexpr T kMax = static_cast<T>(ElementTraits<float>::kMaxFinite);
  const T sum = sumOf(x, residual);
  const uint8_t code = quantize(sum, grid);
  const T rest = sum - Traits::load(Traits::store(dequantize(code, grid)));
  // A double may leave more than a float can hold.
  const T bounded = rest > kMax ? kMax : rest;
  return {code, static_cast<float>(bounded < -kMax ? -kMax : bounded)};
}

// Packed chunks of the same elements from several ranks, one after another in rank order, to be added and divided.
struct Received {
  const uint8_t* packed;
  int64_t copies;
  double divisor;
};

// The original adds n copies in this many partial sums: sum t takes copies t, t + count, ... from 0 upwards, then the
// upper half of the sums is added to the lower half until one is left.
BAGUA_HOST_DEVICE int64_t partialSumCount(int64_t copies) {
  int64_t count = 2;
  while (count < kMaxPartialSums && copies > 2 * count) count *= 2;
  return count;
}

}  // namespace bagua::minmax_uint8
