// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "algorithms/stage.h"

namespace bagua {

// One gradient of a bucket.
struct BucketEntry {
  // The parameter's position among those that the algorithm was given; -1 where it was given none.
  int64_t parameter = -1;
  // A view of the bucket's flat tensor, laid out as the parameter is.
  at::Tensor gradient;
};

// The gradients that travel together: a flat tensor, reduced in place.
struct Bucket {
  at::Tensor flat;
  std::vector<BucketEntry> entries = {};
  StageSeconds seconds = {};
};

}  // namespace bagua
