// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/communicator.h"

namespace bagua {

// Sparse gradients (embeddings with sparse=True): `tensor` becomes the sum, or the mean, over the ranks. Their entries
// are gathered and added in rank order, so that all ranks hold the same bits. What the peers say of their number and of
// their indices is checked against the shape of `tensor`: a ValueError on all ranks. On CUDA this waits for the device,
// because the number of entries decides the sizes, and for the indices.
void allReduceSparse(Communicator& communicator, at::Tensor& tensor, bool average);

}  // namespace bagua
