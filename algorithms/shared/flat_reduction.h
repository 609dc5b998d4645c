// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "algorithms/shared/compressed/mean.h"
#include "backend/executor.h"

namespace bagua {

// The mean or sum of one flat tensor over the ranks, in place, as a single program: for algorithms that are written in
// Python. Collective and asynchronous. `isCompressed`: with the packets of the original, where `options.hierarchical`
// counts.
c10::intrusive_ptr<c10d::Work> reduceFlat(ExecutorProvider& executors, const at::Tensor& flat, bool isCompressed,
                                          const compressed::MeanOptions& options);

}  // namespace bagua
