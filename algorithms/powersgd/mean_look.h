// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "algorithms/powersgd/matrices.h"
#include "algorithms/shared/guard/guard.h"

// What the guard looks at: how far the product of the factors is from the true mean of the gradients, of which a sample
// travels in float32 with the factors; and what the residuals hold.
namespace bagua::powersgd {

// Of matrices, before gradients and residuals are added up; without error feedback there are no residuals. To be
// averaged over the ranks.
at::Tensor lookAt(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& residuals);
int64_t elementsOfLook(const Division& division);
// Hands over what has become of that.
void tell(Guard& guard, int64_t step, const Division& division, int64_t rank, const at::Tensor& look,
          const std::vector<at::Tensor>& products);

}  // namespace bagua::powersgd
