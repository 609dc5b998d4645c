// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua::rounds {

// The outer optimizer: torch.optim.SGD, to the bit, with the difference as gradient.
struct OuterOptions {
  double rate = 1;
  double momentum = 0;
  bool nesterov = false;
};

// Throws ValueError.
void check(const OuterOptions& options);

// What it holds of a flat tensor of weights; float32, or float64 for weights of float64.
struct OuterState {
  at::Tensor weights;
  // Undefined without momentum.
  at::Tensor momentum = {};
  // Before the first step the momentum holds nothing; it begins as the first difference.
  bool hasMomentum = false;
};

// v <- momentum v + d; weights <- weights - rate (d + momentum v), with `nesterov`, else weights - rate v; without
// momentum weights - rate d. `difference` (d) is of no use afterwards.
void step(OuterState& state, at::Tensor& difference, const OuterOptions& options);

}  // namespace bagua::rounds
