// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "kernels/elements.h"

namespace bagua::block_scaled {

// One `Of` for each type of element that block codecs take.
template <template <class Element> class Of>
struct PerElement {
  Of<float> ofFloat;
  Of<double> ofDouble;
  Of<HalfBits> ofHalf;
  Of<BFloat16Bits> ofBFloat16;

  template <class Element>
  [[nodiscard]] const Of<Element>& of() const {
    if constexpr (std::is_same_v<Element, float>) {
      return ofFloat;
    } else if constexpr (std::is_same_v<Element, double>) {
      return ofDouble;
    } else if constexpr (std::is_same_v<Element, HalfBits>) {
      return ofHalf;
    } else {
      return ofBFloat16;
    }
  }
};

}  // namespace bagua::block_scaled
