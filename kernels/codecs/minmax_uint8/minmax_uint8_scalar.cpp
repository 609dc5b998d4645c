// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8_loops.h"

namespace bagua::minmax_uint8::cpu {
namespace {

template <class Element>
using ComputeOf = ElementTraits<Element>::Compute;

template <class Element>
Range<ComputeOf<Element>> rangeLoop(const Element* x, int64_t count) {
  using T = ComputeOf<Element>;
  Range<T> range = emptyRange<T>();
  for (int64_t i = 0; i < count; ++i) {
    const T value = ElementTraits<Element>::load(x[i]);
    range = merge(range, {value, value});
  }
  return range;
}

template <class Element>
void quantizeLoop(const Element* x, uint8_t* codes, int64_t count, const Grid<ComputeOf<Element>>& grid,
                  bool /*bypassCache*/) {
  for (int64_t i = 0; i < count; ++i) codes[i] = quantize(ElementTraits<Element>::load(x[i]), grid);
}

template <class Element>
void dequantizeLoop(const uint8_t* codes, Element* x, int64_t count, const Grid<ComputeOf<Element>>& grid,
                    bool /*bypassCache*/) {
  for (int64_t i = 0; i < count; ++i) x[i] = ElementTraits<Element>::store(dequantize(codes[i], grid));
}

template <class Element>
void reduceLoop(const ReduceSource<ComputeOf<Element>>& source, Element* x, int64_t count) {
  using Traits = ElementTraits<Element>;
  const int64_t sumCount = partialSumCount(source.copies);
  for (int64_t i = 0; i < count; ++i) {
    ComputeOf<Element> sums[kMaxPartialSums] = {};
    for (int64_t copy = 0; copy < source.copies; ++copy) {
      // Rounded to the tensor's type first: the original decodes into a tensor before it adds.
      const uint8_t code = source.codes[copy * source.copyStride + i];
      sums[copy % sumCount] += Traits::load(Traits::store(dequantize(code, source.grids[copy])));
    }
    for (int64_t half = sumCount / 2; half > 0; half /= 2) {
      for (int64_t part = 0; part < half; ++part) sums[part] += sums[part + half];
    }
    x[i] = Traits::store(divide(sums[0], source.divisor));
  }
}

template <class Element>
Range<ComputeOf<Element>> rangeOfSumLoop(const Element* x, const float* residual, int64_t count) {
  using T = ComputeOf<Element>;
  Range<T> range = emptyRange<T>();
  for (int64_t i = 0; i < count; ++i) {
    const T value = sumOf(x[i], residual[i]);
    range = merge(range, {value, value});
  }
  return range;
}

template <class Element>
void quantizeSumLoop(const Element* x, const Feedback& feedback, uint8_t* codes, int64_t count,
                     const Grid<ComputeOf<Element>>& grid) {
  for (int64_t i = 0; i < count; ++i) {
    const CodedSum coded = codeSum(x[i], feedback.residual[i], grid);
    codes[i] = coded.code;
    feedback.next[i] = coded.residual;
  }
}

template <class Element>
void addLoop(const uint8_t* codes, ComputeOf<Element>* sums, int64_t count, const Grid<ComputeOf<Element>>& grid) {
  using Traits = ElementTraits<Element>;
  for (int64_t i = 0; i < count; ++i) sums[i] += Traits::load(Traits::store(dequantize(codes[i], grid)));
}

template <class Element>
constexpr ElementLoops<Element> elementLoops() {
  return {.range = rangeLoop<Element>,
          .quantize = quantizeLoop<Element>,
          .dequantize = dequantizeLoop<Element>,
          .reduce = reduceLoop<Element>,
          .rangeOfSum = rangeOfSumLoop<Element>,
          .quantizeSum = quantizeSumLoop<Element>,
          .add = addLoop<Element>};
}

}  // namespace

const Loops& scalarLoops() {
  static constexpr Loops kLoops = {"scalar", elementLoops<float>(), elementLoops<double>(), elementLoops<HalfBits>(),
                                   elementLoops<BFloat16Bits>()};
  return kLoops;
}

}  // namespace bagua::minmax_uint8::cpu
