// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/elements.h"

// The arithmetic of minmax_uint8, shared by the CPU and CUDA, which therefore agree bit for bit. kernels/README.md has
// the formulas. No expression here multiplies and adds, so contraction to fused multiply-add cannot change a result.
namespace bagua::minmax_uint8 {

inline constexpr int64_t kHeaderBytes = 32;
inline constexpr int64_t kAlignment = 32;
inline constexpr int64_t kMostPartialSums = 32;

template <class Element>
using ComputeOf = typename ElementTraits<Element>::Compute;

// Without a call and without a branch on the CPU, where compilers make vectors of it for every processor.
template <class T>
BAGUA_HOST_DEVICE T roundHalfToEven(T x) {
#if defined(__CUDA_ARCH__)
  return rint(x);
#else
  // From here on every number is whole. Adding it to a smaller one rounds that to a whole number.
  constexpr T kWhole = sizeof(T) == sizeof(float) ? static_cast<T>(0x1p23) : static_cast<T>(0x1p52);
  const T size = std::abs(x);
  return size < kWhole ? std::copysign((size + kWhole) - kWhole, x) : x;
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

// A reduction with merge() starts with it.
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

// What the header holds for values of this range: NaN twice if one was not finite, and never a negative zero, which
// minimum and maximum would yield or not depending on the order of the elements. It is rounded to the tensor's type, as
// sums with residuals lie between the numbers of a type, or beyond its largest.
template <class Element>
BAGUA_HOST_DEVICE Range<ComputeOf<Element>> headerRange(Range<ComputeOf<Element>> range, int64_t count) {
  using Traits = ElementTraits<Element>;
  using T = ComputeOf<Element>;
  constexpr T kMax = Traits::kMaxFinite;
  if (count == 0) return {T{0}, T{0}};
  if (!isFinite(range.low) || !isFinite(range.high)) return {ElementTraits<T>::nan(), ElementTraits<T>::nan()};
  const T low = range.low < -kMax ? -kMax : range.low;
  const T high = range.high > kMax ? kMax : range.high;
  return {Traits::load(Traits::store(low)) + T{0}, Traits::load(Traits::store(high)) + T{0}};
}

template <class Element>
BAGUA_HOST_DEVICE void writeHeader(Range<ComputeOf<Element>> range, uint8_t* header) {
  using Traits = ElementTraits<Element>;
  // Stored without conversion: a converted NaN has different bits on different devices.
  const bool isNumber = range.low == range.low;
  const Element values[2] = {isNumber ? Traits::store(range.low) : Traits::nan(),
                             isNumber ? Traits::store(range.high) : Traits::nan()};
  static_assert(sizeof(values) <= kHeaderBytes);
  memset(header, 0, kHeaderBytes);
  memcpy(header, values, sizeof(values));
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

  [[nodiscard]] BAGUA_HOST_DEVICE bool isFinite() const { return base == base; }
};

// The original's grid has base 0: multiples of 1 / scale, with zero among them.
template <class T>
BAGUA_HOST_DEVICE T gridScale(Range<T> range) {
  const T span = range.high - range.low;
  if (isFinite(span)) return divide(T{255}, span + static_cast<T>(1e-7));
  return divide(static_cast<T>(127.5), range.high * static_cast<T>(0.5) - range.low * static_cast<T>(0.5));
}

// A pure function of the range in the header, so encoder and decoder cannot disagree. Departs from the original in that
//  - a range that is not finite (or, from a damaged packet, not in order) yields a grid of NaN,
//  - a constant other than zero is its own grid and decodes to itself,
//  - where upper - 255 cannot be represented, codes count from the minimum and cannot wrap,
//  - a span that overflows is halved first, and no finite chunk decodes to infinity.
template <class Element>
BAGUA_HOST_DEVICE Grid<ComputeOf<Element>> makeGrid(Range<ComputeOf<Element>> range) {
  using T = ComputeOf<Element>;
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

// Of the chunk with this header.
template <class Element>
BAGUA_HOST_DEVICE Grid<ComputeOf<Element>> gridOf(const uint8_t* header) {
  Element values[2];
  memcpy(values, header, sizeof(values));
  return makeGrid<Element>({ElementTraits<Element>::load(values[0]), ElementTraits<Element>::load(values[1])});
}

// Only for a finite grid.
template <class T>
BAGUA_HOST_DEVICE uint8_t quantize(T x, const Grid<T>& grid) {
  const T level = roundHalfToEven((x - grid.base) * grid.scale);
  const T code = (level < grid.upper ? level : grid.upper) - grid.lower;
  return static_cast<uint8_t>(code > T{0} ? static_cast<int>(code) : 0);
}

// As the tensor's type holds it.
template <class Element>
BAGUA_HOST_DEVICE Element dequantize(uint8_t code, const Grid<ComputeOf<Element>>& grid) {
  using T = ComputeOf<Element>;
  const T value = grid.base + divide(static_cast<T>(code) + grid.lower, grid.scale);
  const T bounded = value > grid.ceiling ? grid.ceiling : value;  // Comparisons that let a NaN pass.
  return ElementTraits<Element>::store(bounded < grid.floor ? grid.floor : bounded);
}

// h of error feedback, or the value where there is none.
template <class Element>
BAGUA_HOST_DEVICE ComputeOf<Element> sumAt(const Element* values, const float* residual, int64_t i) {
  const ComputeOf<Element> value = ElementTraits<Element>::load(values[i]);
  return residual == nullptr ? value : value + static_cast<ComputeOf<Element>>(residual[i]);
}

// The next residual of `sum`.
template <class Element>
BAGUA_HOST_DEVICE float restOf(ComputeOf<Element> sum, uint8_t code, const Grid<ComputeOf<Element>>& grid) {
  using T = ComputeOf<Element>;
  constexpr T kMax = static_cast<T>(ElementTraits<float>::kMaxFinite);
  const T rest = sum - ElementTraits<Element>::load(dequantize<Element>(code, grid));
  // A double may leave more than a float can hold.
  const T bounded = rest > kMax ? kMax : rest;
  return static_cast<float>(bounded < -kMax ? -kMax : bounded);
}

// The original adds n copies in this many partial sums: sum t takes copies t, t + count, ... from 0 upwards, then the
// upper half of the sums is added to the lower half until one is left.
BAGUA_HOST_DEVICE int64_t partialSumCount(int64_t copies) {
  int64_t count = 2;
  while (count < kMostPartialSums && copies > 2 * count) count *= 2;
  return count;
}

}  // namespace bagua::minmax_uint8
