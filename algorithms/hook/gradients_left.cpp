// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/gradients_left.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>

namespace bagua {

GradientsLeft::Marks GradientsLeft::marks() const {
  Marks marks;
  marks.reserve(parameters_.size());
  for (const auto& parameter : parameters_) {
    const at::Tensor& gradient = parameter.grad();
    const bool isCounted = gradient.defined() && !gradient.is_inference();
    marks.emplace_back(gradient.unsafeGetTensorImpl(), isCounted ? static_cast<uint32_t>(gradient._version()) : 0);
  }
  return marks;
}

bool GradientsLeft::haveGone() const {
  const at::NoGradGuard noGrad;
  if (marks() == marks_) return false;
  return std::none_of(parameters_.begin(), parameters_.end(), [](const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) return false;
    return gradient.is_sparse() ? gradient._nnz() > 0 : gradient.any().item<bool>();
  });
}

bool GradientsLeft::areFinite() const {
  const at::NoGradGuard noGrad;
  return std::all_of(parameters_.begin(), parameters_.end(), [](const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) return true;
    return at::isfinite(gradient.is_sparse() ? gradient._values() : gradient).all().item<bool>();
  });
}

}  // namespace bagua
