// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/shared/compressed/mean.h"
#include "kernels/codec.h"

// Parameters that no rank has used in a step. DDP does not show the optimizer what comes of their gradients (and leaves
// .grad as it is), so that whatever residuals had sent of them would be lost. A number for each parameter travels in
// the messages of the gradients and tells whether some rank has used it.
namespace bagua::compressed {

// Of this rank: 1 for each entry that it has used, else 0.
at::Tensor usedByThisRank(const Bucket& bucket, at::ScalarType dtype);
// To be summed up in the messages of the others.
Sum sumOfUses(const Bucket& bucket);

// Sets the values to those of `others` where `isUsed`, one number, is zero. Nothing waits for a CUDA device.
void replaceUnlessUsed(const at::Tensor& values, const at::Tensor& isUsed, const at::Tensor& others);
// Sets the gradients to zero of what no rank has used, an entry for each number.
void clearUnused(const Bucket& bucket, const at::Tensor& areUsed);

// What of `elements` lies in `pieces`, counted in a tensor that holds these one after another.
std::vector<Piece> overlapsWithin(const std::vector<Piece>& pieces, const Piece& elements);

}  // namespace bagua::compressed
