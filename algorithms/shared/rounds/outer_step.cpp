// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/outer_step.h"

#include <c10/util/Exception.h>

#include <utility>

#include "algorithms/shared/cache_blocks.h"

namespace bagua::rounds {

void check(const OuterOptions& options) {
  TORCH_CHECK_VALUE(options.rate >= 0, "bagua: outer_lr must not be negative, got ", options.rate);
  TORCH_CHECK_VALUE(options.momentum >= 0, "bagua: outer_momentum must not be negative, got ", options.momentum);
}

void step(OuterState& state, at::Tensor& difference, const OuterOptions& options) {
  const bool isFirst = !state.hasMomentum;
  inBlocks(difference.numel(), difference.device(), [&](int64_t begin, int64_t length) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, length); };
    at::Tensor gradient = block(difference);
    // The operations of torch, in its order.
    if (options.momentum != 0) {
      at::Tensor momentum = block(state.momentum);
      if (isFirst) {
        momentum.copy_(gradient);
      } else {
        momentum.mul_(options.momentum).add_(gradient);
      }
      if (options.nesterov) {
        gradient.add_(momentum, options.momentum);
      } else {
        gradient = std::move(momentum);
      }
    }
    block(state.weights).add_(gradient, -options.rate);
  });
  state.hasMomentum = options.momentum != 0;
}

}  // namespace bagua::rounds
