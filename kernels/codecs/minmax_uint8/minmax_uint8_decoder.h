// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/codecs/minmax_uint8/minmax_uint8_kernels.h"

// Decoding many codes of one grid without a division for each, to the same bits as dequantize(). A division is some
// ten instructions and a branch on a GPU, so many that they and not the memory would limit the decoding.
namespace bagua::minmax_uint8 {

// A grid and the reciprocal of its scale.
template <class T>
struct Decoder {
  Grid<T> grid;
  // Zero where decode() is not to be used.
  T reciprocal;
};

// Rounded once.
template <class T>
BAGUA_HOST_DEVICE T multiplyAdd(T a, T b, T c) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) {
    return __fmaf_rn(a, b, c);
  } else {
    return __fma_rn(a, b, c);
  }
#else
  if constexpr (sizeof(T) == sizeof(float)) {
    return __builtin_fmaf(a, b, c);
  } else {
    return __builtin_fma(a, b, c);
  }
#endif
}

template <class T>
BAGUA_HOST_DEVICE Decoder<T> makeDecoder(const Grid<T>& grid) {
  // Levels are whole numbers of at most 2^24 (2^53): with these bounds nothing below overflows or underflows.
  constexpr T kFar = sizeof(T) == sizeof(float) ? static_cast<T>(0x1p60) : static_cast<T>(0x1p400);
  const bool isTame = grid.scale <= kFar && grid.scale >= T{1} / kFar;
  return {grid, isTame ? divide(T{1}, grid.scale) : T{0}};
}

// level / scale, rounded as the division rounds it. The product is less than two units in the last place off, its
// correction by the remainder less than one; and correcting such a quotient by its remainder, which is exact, rounds
// correctly if the reciprocal is correctly rounded (P. Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", 1990).
template <class T>
BAGUA_HOST_DEVICE T quotient(T level, T scale, T reciprocal) {
  const T rough = multiplyAdd(level, reciprocal, T{0});
  const T close = multiplyAdd(multiplyAdd(-rough, scale, level), reciprocal, rough);
  return multiplyAdd(multiplyAdd(-close, scale, level), reciprocal, close);
}

// Only where decoder.reciprocal is not zero.
template <class T>
BAGUA_HOST_DEVICE T decode(uint8_t code, const Decoder<T>& decoder) {
  const Grid<T>& grid = decoder.grid;
  return valueAt(quotient(static_cast<T>(code) + grid.lower, grid.scale, decoder.reciprocal), grid);
}

}  // namespace bagua::minmax_uint8
