// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/communicator.h"

namespace bagua {

// Sparse gradients (embeddings with sparse=True): `tensor` becomes the sum, or the mean, over the ranks. Their entries
// are gathered and added in rank order, so that all ranks hold the same bits. On CUDA this waits for the device once,
// because the number of entries decides the sizes.
void allReduceSparse(Communicator& communicator, at::Tensor& tensor, bool average);

}  // namespace bagua
