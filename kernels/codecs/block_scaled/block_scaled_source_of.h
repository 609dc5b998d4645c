// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/codec.h"
#include "kernels/codecs/block_scaled/block_scaled_source.h"
#include "kernels/tensor_elements.h"

namespace bagua::block_scaled {

template <class Element>
Source<Element> sourceOf(const at::Tensor& values, const Encoding& encoding) {
  Source<Element> source{.values = dataOf<Element>(values),
                         .isStochastic = encoding.rounding == Rounding::kStochastic,
                         .key = encoding.key};
  if (encoding.hasFeedback()) {
    source.residual = mutableDataOf<float>(encoding.residual);
    source.nextResidual = mutableDataOf<float>(encoding.nextResidual);
    if (encoding.wasLost.defined()) source.wasLost = dataOf<bool>(encoding.wasLost);
  }
  return source;
}

}  // namespace bagua::block_scaled
