// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/outstanding_forwards.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>

namespace bagua {

void OutstandingForwards::add(const std::vector<at::Tensor>& outputs) {
  std::erase_if(ends_, [](const auto& end) { return end.expired(); });
  for (const auto& output : outputs) {
    if (output.grad_fn()) ends_.push_back(weak(output.grad_fn()));
  }
}

bool OutstandingForwards::any() const {
  return std::any_of(ends_.begin(), ends_.end(), [](const auto& end) { return !end.expired(); });
}

}  // namespace bagua
