// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

// Adam's arithmetic on CPU tensors, each in one pass over memory, on the intra-op threads of torch. A chain
// of operations on tensors takes more than twice as long, even block by block, where what one writes the next finds in
// a cache: 10.6 million weights 13.4 instead of 6.5 ms, their momenta 8.6 instead of 3.3.
namespace bagua::adam {

// Whether the functions below take these together: float or double on the CPU, all of one type and shape, and stored
// alike without gaps.
bool areAlike(const std::vector<at::Tensor>& tensors);

struct StepScales {
  // Minus the learning rate over 1 - beta1^k.
  double size;
  // The root of 1 - beta2^k.
  double correction;
  double eps;
};

// momentum = gradient;  weights += size * momentum / (sqrt(variance) / correction + eps)
// in this order, every operation rounded to the tensors' type: the same bits on every processor.
void step(const at::Tensor& weights, const at::Tensor& momentum, const at::Tensor& variance, const at::Tensor& gradient,
          const StepScales& scales);

// gradient = decay * momentum + (1 - decay) * gradient. As torch's add_() of a factor does, the second product and the
// sum are rounded at once on processors that can.
void makeMomentum(const at::Tensor& gradient, const at::Tensor& momentum, double decay);

}  // namespace bagua::adam
