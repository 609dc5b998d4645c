// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include "kernels/codecs/minmax_uint8/minmax_uint8_loops.h"

// The element loops over an instruction set's registers. `Isa` names kWidth, the elements per step, and operations on
// Vec<T>, kWidth values of float or double. Only for translation units compiled for one instruction set: Isa must have
// internal linkage, so that no code made here is shared with units that run elsewhere.
namespace bagua::minmax_uint8::cpu {

template <class Isa, class Element>
struct VectorLoops {
  using T = ElementTraits<Element>::Compute;
  using Vec = Isa::template Vec<T>;
  static constexpr int64_t kWidth = Isa::kWidth;
  static constexpr int64_t kGroup = 4 * kWidth;  // Four vectors of 32-bit codes make one vector of bytes.

  template <class E>
  using OneVector = E[static_cast<size_t>(kWidth)];
  template <class E>
  using OneGroup = E[static_cast<size_t>(kGroup)];

  struct Bounds {
    Vec low;
    Vec high;
    Isa::template Flag<T> nan;
  };

  // Minimum and maximum instructions drop a NaN, hence the flag.
  static BAGUA_HOST_DEVICE void note(Bounds& bounds, Vec a, Vec b) {
    bounds.low = Isa::min(bounds.low, Isa::min(a, b));
    bounds.high = Isa::max(bounds.high, Isa::max(a, b));
    bounds.nan = Isa::either(bounds.nan, Isa::unordered(a, b));
  }

  static BAGUA_HOST_DEVICE void noteGroup(Bounds (&bounds)[2], const Element* x) {
    note(bounds[0], Isa::load(x), Isa::load(x + kWidth));
    note(bounds[1], Isa::load(x + 2 * kWidth), Isa::load(x + 3 * kWidth));
  }

  static BAGUA_HOST_DEVICE Vec sums(const Element* x, const float* residual) {
    return Isa::add(Isa::load(x), Isa::template loadFloats<T>(residual));
  }

  static BAGUA_HOST_DEVICE void noteGroupOfSums(Bounds (&bounds)[2], const Element* x, const float* residual) {
    note(bounds[0], sums(x, residual), sums(x + kWidth, residual + kWidth));
    note(bounds[1], sums(x + 2 * kWidth, residual + 2 * kWidth), sums(x + 3 * kWidth, residual + 3 * kWidth));
  }

  static BAGUA_HOST_DEVICE Bounds boundsOf(Vec first) { return {first, first, Isa::unordered(first, first)}; }

  // What is left of a group, filled up with an element that belongs to it.
  template <class E>
  static BAGUA_HOST_DEVICE void copyRest(OneGroup<E>& rest, const E* x, int64_t count) {
    for (E& element : rest) element = x[0];
    memcpy(rest, x, static_cast<size_t>(count) * sizeof(E));
  }

  static BAGUA_HOST_DEVICE Range<T> finish(Bounds (&both)[2]) {
    Bounds& bounds = both[0];
    note(bounds, both[1].low, both[1].high);
    bounds.nan = Isa::either(bounds.nan, both[1].nan);
    if (Isa::any(bounds.nan)) return {ElementTraits<T>::nan(), ElementTraits<T>::nan()};
    OneVector<T> lows;
    OneVector<T> highs;
    Isa::store(lows, bounds.low);
    Isa::store(highs, bounds.high);
    Range<T> range = {lows[0], highs[0]};
    for (int64_t i = 1; i < kWidth; ++i) range = merge(range, {lows[i], highs[i]});
    return range;
  }

  static Range<T> range(const Element* x, int64_t count) {
    if (count == 0) return emptyRange<T>();
    const Vec first = Isa::template broadcast<T>(ElementTraits<Element>::load(x[0]));
    Bounds bounds[2] = {boundsOf(first), boundsOf(first)};
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) noteGroup(bounds, x + i);
    if (i < count) {
      OneGroup<Element> rest;
      copyRest(rest, x + i, count - i);
      noteGroup(bounds, rest);
    }
    return finish(bounds);
  }

  static Range<T> rangeOfSum(const Element* x, const float* residual, int64_t count) {
    if (count == 0) return emptyRange<T>();
    const Vec first = Isa::template broadcast<T>(sumOf(x[0], residual[0]));
    Bounds bounds[2] = {boundsOf(first), boundsOf(first)};
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) noteGroupOfSums(bounds, x + i, residual + i);
    if (i < count) {
      OneGroup<Element> rest;
      OneGroup<float> restOfResidual;
      copyRest(rest, x + i, count - i);
      copyRest(restOfResidual, residual + i, count - i);
      noteGroupOfSums(bounds, rest, restOfResidual);
    }
    return finish(bounds);
  }

  struct VectorGrid {
    Vec base;
    Vec scale;
    Vec lower;
    Vec upper;
    Vec floor;
    Vec ceiling;

    explicit BAGUA_HOST_DEVICE VectorGrid(const Grid<T>& grid)
        : base(Isa::template broadcast<T>(grid.base)),
          scale(Isa::template broadcast<T>(grid.scale)),
          lower(Isa::template broadcast<T>(grid.lower)),
          upper(Isa::template broadcast<T>(grid.upper)),
          floor(Isa::template broadcast<T>(grid.floor)),
          ceiling(Isa::template broadcast<T>(grid.ceiling)) {}
  };

  // As quantize(), but for the bounds 0 and 255, which Isa::pack applies.
  static BAGUA_HOST_DEVICE auto codesOf(const Element* x, const VectorGrid& grid) {
    const Vec level = Isa::roundHalfToEven(Isa::mul(Isa::sub(Isa::load(x), grid.base), grid.scale));
    return Isa::toInt(Isa::sub(Isa::min(level, grid.upper), grid.lower));
  }

  // Codes kGroup elements; `store` is one of Isa's ways to store their bytes.
  template <class Store>
  static BAGUA_HOST_DEVICE void quantizeGroup(const Element* x, uint8_t* codes, const VectorGrid& grid,
                                              const Store& store) {
    store(codes, Isa::pack(codesOf(x, grid), codesOf(x + kWidth, grid), codesOf(x + 2 * kWidth, grid),
                           codesOf(x + 3 * kWidth, grid)));
  }

  static BAGUA_HOST_DEVICE void quantizeSome(const Element* x, uint8_t* codes, int64_t count, const VectorGrid& grid) {
    OneGroup<Element> rest = {};
    OneGroup<uint8_t> restCodes;
    memcpy(rest, x, static_cast<size_t>(count) * sizeof(Element));
    quantizeGroup(rest, restCodes, grid, Isa::storeCodes);
    memcpy(codes, restCodes, static_cast<size_t>(count));
  }

  static void quantize(const Element* x, uint8_t* codes, int64_t count, const Grid<T>& grid, bool bypassCache) {
    const VectorGrid vectorGrid(grid);
    int64_t i = 0;
    if (bypassCache && count >= 2 * kGroup) {
      i = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(codes) % static_cast<uintptr_t>(kGroup));
      quantizeSome(x, codes, i, vectorGrid);
      for (; i + kGroup <= count; i += kGroup) quantizeGroup(x + i, codes + i, vectorGrid, Isa::streamCodes);
      Isa::fence();
    }
    for (; i + kGroup <= count; i += kGroup) quantizeGroup(x + i, codes + i, vectorGrid, Isa::storeCodes);
    if (i < count) quantizeSome(x + i, codes + i, count - i, vectorGrid);
  }

  // As dequantize(): the operands stand so that a NaN passes both bounds.
  static BAGUA_HOST_DEVICE Vec valueAt(Vec codes, const VectorGrid& grid) {
    const Vec value = Isa::add(grid.base, Isa::div(Isa::add(codes, grid.lower), grid.scale));
    return Isa::max(grid.floor, Isa::min(grid.ceiling, value));
  }

  static BAGUA_HOST_DEVICE Vec valueOf(const uint8_t* codes, const VectorGrid& grid) {
    return valueAt(Isa::template loadCodes<T>(codes), grid);
  }

  // As codeSum(). The codes stay numbers of T until they are packed.
  static BAGUA_HOST_DEVICE auto codesOfSums(const Element* x, const Feedback& feedback, const VectorGrid& grid) {
    const Vec sum = sums(x, feedback.residual);
    const Vec level = Isa::roundHalfToEven(Isa::mul(Isa::sub(sum, grid.base), grid.scale));
    const Vec code = Isa::max(Isa::sub(Isa::min(level, grid.upper), grid.lower), Isa::template broadcast<T>(T{0}));
    Isa::storeFloats(feedback.next, Isa::sub(sum, Isa::rounded(valueAt(code, grid), x)));
    return Isa::toInt(code);
  }

  static BAGUA_HOST_DEVICE void quantizeGroupOfSums(const Element* x, const Feedback& feedback, uint8_t* codes,
                                                    const VectorGrid& grid) {
    const auto first = codesOfSums(x, feedback, grid);
    const auto second = codesOfSums(x + kWidth, feedback.from(kWidth), grid);
    const auto third = codesOfSums(x + 2 * kWidth, feedback.from(2 * kWidth), grid);
    const auto fourth = codesOfSums(x + 3 * kWidth, feedback.from(3 * kWidth), grid);
    Isa::storeCodes(codes, Isa::pack(first, second, third, fourth));
  }

  static void quantizeSum(const Element* x, const Feedback& feedback, uint8_t* codes, int64_t count,
                          const Grid<T>& grid) {
    const VectorGrid vectorGrid(grid);
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) {
      quantizeGroupOfSums(x + i, feedback.from(i), codes + i, vectorGrid);
    }
    if (i == count) return;
    OneGroup<Element> rest;
    OneGroup<float> residual;
    OneGroup<float> next;
    OneGroup<uint8_t> restCodes;
    copyRest(rest, x + i, count - i);
    copyRest(residual, feedback.residual + i, count - i);
    quantizeGroupOfSums(rest, {residual, next}, restCodes, vectorGrid);
    memcpy(feedback.next + i, next, static_cast<size_t>(count - i) * sizeof(float));
    memcpy(codes + i, restCodes, static_cast<size_t>(count - i));
  }

  static BAGUA_HOST_DEVICE void addSome(const uint8_t* codes, T* sums, const VectorGrid& grid) {
    constexpr const Element* kType = nullptr;
    Isa::store(sums, Isa::add(Isa::load(sums), Isa::rounded(valueOf(codes, grid), kType)));
  }

  static void add(const uint8_t* codes, T* sums, int64_t count, const Grid<T>& grid) {
    const VectorGrid vectorGrid(grid);
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) addSome(codes + i, sums + i, vectorGrid);
    if (i == count) return;
    OneVector<uint8_t> restCodes = {};
    OneVector<T> rest = {};
    memcpy(restCodes, codes + i, static_cast<size_t>(count - i));
    memcpy(rest, sums + i, static_cast<size_t>(count - i) * sizeof(T));
    addSome(restCodes, rest, vectorGrid);
    memcpy(sums + i, rest, static_cast<size_t>(count - i) * sizeof(T));
  }

  static BAGUA_HOST_DEVICE void dequantizeSome(const uint8_t* codes, Element* x, int64_t count,
                                               const VectorGrid& grid) {
    OneVector<uint8_t> restCodes = {};
    OneVector<Element> rest;
    memcpy(restCodes, codes, static_cast<size_t>(count));
    Isa::store(rest, valueOf(restCodes, grid));
    memcpy(x, rest, static_cast<size_t>(count) * sizeof(Element));
  }

  static void dequantize(const uint8_t* codes, Element* x, int64_t count, const Grid<T>& grid, bool bypassCache) {
    const VectorGrid vectorGrid(grid);
    int64_t i = 0;
    if (bypassCache && count >= kGroup) {
      i = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(x) % 64 / sizeof(Element));
      for (int64_t head = 0; head < i; head += kWidth) {
        dequantizeSome(codes + head, x + head, i - head < kWidth ? i - head : kWidth, vectorGrid);
      }
      for (; i + kWidth <= count; i += kWidth) Isa::stream(x + i, valueOf(codes + i, vectorGrid));
      Isa::fence();
    }
    for (; i + kWidth <= count; i += kWidth) Isa::store(x + i, valueOf(codes + i, vectorGrid));
    if (i < count) dequantizeSome(codes + i, x + i, count - i, vectorGrid);
  }

  // kWidth sums, of the codes from `codes` on in every copy.
  template <int kPartialSums>
  static BAGUA_HOST_DEVICE void reduceSome(const ReduceSource<T>& source, const uint8_t* codes, Element* x) {
    Vec sums[static_cast<size_t>(kPartialSums)];
#pragma GCC unroll 32
    for (int part = 0; part < kPartialSums; ++part) sums[part] = Isa::template broadcast<T>(T{0});
    for (int64_t first = 0; first < source.copies; first += kPartialSums) {
      // Unrolled, so that the partial sums stay in registers.
#pragma GCC unroll 32
      for (int part = 0; part < kPartialSums; ++part) {
        const int64_t copy = first + part;
        if (copy >= source.copies) break;
        const Vec value = valueOf(codes + copy * source.copyStride, VectorGrid(source.grids[copy]));
        sums[part] = Isa::add(sums[part], Isa::rounded(value, x));
      }
    }
#pragma GCC unroll 5
    for (int half = kPartialSums / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
      for (int part = 0; part < half; ++part) sums[part] = Isa::add(sums[part], sums[part + half]);
    }
    Isa::store(x, Isa::div(sums[0], Isa::template broadcast<T>(source.divisor)));
  }

  template <int kPartialSums>
  static void reduceIn(const ReduceSource<T>& source, Element* x, int64_t count) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) reduceSome<kPartialSums>(source, source.codes + i, x + i);
    if (i == count) return;
    OneVector<Element> rest;
    reduceSome<kPartialSums>(source, source.codes + i, rest);
    memcpy(x + i, rest, static_cast<size_t>(count - i) * sizeof(Element));
  }

  static void reduce(const ReduceSource<T>& source, Element* x, int64_t count) {
    switch (partialSumCount(source.copies)) {
      case 2:
        return reduceIn<2>(source, x, count);
      case 4:
        return reduceIn<4>(source, x, count);
      case 8:
        return reduceIn<8>(source, x, count);
      case 16:
        return reduceIn<16>(source, x, count);
      default:
        return reduceIn<kMaxPartialSums>(source, x, count);
    }
  }

  static constexpr ElementLoops<Element> loops() {
    return {range, quantize, dequantize, reduce, rangeOfSum, quantizeSum, add};
  }
};

template <class Isa>
constexpr Loops vectorLoops(const char* name) {
  return {name, VectorLoops<Isa, float>::loops(), VectorLoops<Isa, double>::loops(),
          VectorLoops<Isa, HalfBits>::loops(), VectorLoops<Isa, BFloat16Bits>::loops()};
}

}  // namespace bagua::minmax_uint8::cpu
