// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "algorithms/bucket.h"
#include "backend/communicator.h"

namespace bagua::bytegrad {

struct CompressedMean {
  // Full precision inside a host, 8 bits between hosts; false: 8 bits between all ranks.
  bool hierarchical = true;
  // Mean over the ranks; false: their sum.
  bool average = true;
};

// Replaces the bucket's flat tensor, on every rank by the same bits, by the mean over the ranks with 8-bit messages.
void reduceCompressed(Bucket& bucket, const CompressedMean& options, Communicator& communicator);

}  // namespace bagua::bytegrad
