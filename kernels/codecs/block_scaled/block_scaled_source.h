// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/codecs/block_scaled/block_scaled_formats.h"

// What is coded, and the steps between an element's type and the float32 of the formats, for CPU and device.
namespace bagua::block_scaled {

// A chunk's values with what is to become of them. Both residuals are null without error feedback; they may be one.
template <class Element>
struct Source {
  const Element* values;
  float* residual = nullptr;
  float* nextResidual = nullptr;
  // As Encoding has it. Only kernels look at it, on the CPU Encoding::restoreIfLost() has been called.
  const bool* wasLost = nullptr;
  bool isStochastic;
  uint64_t key;
};

// A double that no float holds becomes the largest number that is coded, but an infinity stays one.
BAGUA_HOST_DEVICE float toCoded(float x) { return x; }
BAGUA_HOST_DEVICE float toCoded(double x) {
  constexpr double kBound = kLargest;
  constexpr double kMax = std::numeric_limits<double>::max();
  if (x > kBound && x <= kMax) x = kBound;
  if (x < -kBound && x >= -kMax) x = -kBound;
  return static_cast<float>(x);
}

// Comparisons that let a NaN pass.
BAGUA_HOST_DEVICE float boundedToHalf(float x) {
  constexpr float kMax = ElementTraits<HalfBits>::kMaxFinite;
  const float bounded = x > kMax ? kMax : x;
  return bounded < -kMax ? -kMax : bounded;
}

// A decoded number as an element. A mean is stored as it is: there sums that no half holds are to be seen.
template <class Element>
BAGUA_HOST_DEVICE Element toElement(typename ElementTraits<Element>::Compute x) {
  if constexpr (std::is_same_v<Element, HalfBits>) {
    return ElementTraits<Element>::store(boundedToHalf(x));
  } else {
    return ElementTraits<Element>::store(x);
  }
}

// What is left of h, as a residual.
template <class T>
BAGUA_HOST_DEVICE float restOf(T h, T decoded) {
  constexpr T kMax = std::numeric_limits<float>::max();
  const T rest = h - decoded;
  const T bounded = rest > kMax ? kMax : rest;
  return static_cast<float>(bounded < -kMax ? -kMax : bounded);
}

}  // namespace bagua::block_scaled
