// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "kernels/elements.h"

namespace bagua::minmax_uint8 {

// Calls f with a value of the element type that `dtype` names.
template <class F>
void withElement(at::ScalarType dtype, const char* operation, const F& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kHalf:
      return f(HalfBits{});
    case at::kBFloat16:
      return f(BFloat16Bits{});
    default:
      TORCH_CHECK_TYPE(false, "minmax_uint8 ", operation, " expects float32, float64, float16 or bfloat16, got ",
                       dtype);
  }
}

}  // namespace bagua::minmax_uint8
