// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "backend/operation/operation.h"

namespace bagua {

// Returns whether all tensors of a list, which is not empty, have as many elements.
bool areEven(const std::vector<at::Tensor>& tensors);

// What the ranks compare of an operation on a list of tensors, and show where they differ: how many there are, and the
// size of each. `operation` keeps the number of elements that it names.
void compareSizes(Operation& operation, const std::vector<at::Tensor>& tensors);

// The same for one that exchanges all tensors of the list, one after another, and names their elements together.
void compareSizesOfAll(Operation& operation, const std::vector<at::Tensor>& tensors);

}  // namespace bagua
