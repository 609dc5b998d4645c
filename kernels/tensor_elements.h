// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <type_traits>

#include "kernels/elements.h"
#include "kernels/packed_rows.h"

// From a tensor to the element types of elements.h.
namespace bagua {

// Calls f with a value of the element type that `dtype` names. `what` is what takes these types.
template <class F>
void withElement(at::ScalarType dtype, const char* what, const F& f) {
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
      TORCH_CHECK_TYPE(false, what, " expects float32, float64, float16 or bfloat16, got ", dtype);
  }
}

template <class T>
const T* dataOf(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* mutableDataOf(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Those of a matrix of bytes.
template <class Byte>
PackedRows<Byte> rowsOf(const at::Tensor& packed) {
  if constexpr (std::is_const_v<Byte>) {
    return {dataOf<Byte>(packed), packed.stride(0), packed.size(1)};
  } else {
    return {mutableDataOf<Byte>(packed), packed.stride(0), packed.size(1)};
  }
}

}  // namespace bagua
