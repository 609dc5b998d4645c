// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

namespace bagua {

// Cuts those buckets of a DDP model that hold more than `mostBytes` into neighbouring ones of at most that, a larger
// parameter alone in its own; the order of the parameters stays. `parameters` are those of the reducer, in its order;
// `logger` is the reducer's, which knows what its buckets hold. Between two steps, after DDP has built its buckets.
//
// For CPU tensors. DDP's default of 25 MiB suits the latency of a fast network. On a slow one the last bucket is ready
// when backward ends and all of it travels after that: of 42 MB of gradients between two hosts at 1 Gbit/s, 23 MB.
void splitBuckets(c10d::Reducer& reducer, c10d::Logger& logger, const std::vector<at::Tensor>& parameters,
                  int64_t mostBytes);

// Has each bucket hold the parameters of these positions, all of the model's `count`: as another rank has them, which
// made them where other ranks were. At such a moment, too.
void layOutBuckets(c10d::Reducer& reducer, const std::vector<std::vector<int64_t>>& layout, int64_t count);

// Has DDP build its final buckets before the first backward, after which it does so otherwise, with the gradients in
// the reverse order of the parameters. False, and nothing is done, for a model whose buckets stay as they are. All
// ranks take part, as in DDP's own way.
bool settleBuckets(c10d::Reducer& reducer);

// Drops what DDP has noted of a backward that has failed, as it does itself at the end of one, which it queues with the
// last bucket: the next forward would be refused, as would other buckets, and with find_unused_parameters=True the next
// backward would wait for gradients of parameters that it does not use. Between two steps.
void forgetBackward(c10d::Reducer& reducer);

}  // namespace bagua
