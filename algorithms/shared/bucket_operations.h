// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/weight_exchanges/average_round.h"
#include "algorithms/shared/weight_exchanges/ring_exchange.h"
#include "backend/executor.h"

// What the algorithms do to one flat tensor, as single programs, for algorithms that are written in Python. All methods
// are collective and asynchronous; tensors are changed in place.
namespace bagua::bucket_operations {

// Mean or sum over the ranks; `isCompressed`: with the packets of the original (then `options.hierarchical` counts).
c10::intrusive_ptr<c10d::Work> reduce(ExecutorProvider& executors, const at::Tensor& flat, bool isCompressed,
                                      const compressed::MeanOptions& options);

// Exchange number `exchange` of weights, see PeerAverage.
c10::intrusive_ptr<c10d::Work> averagePeers(ExecutorProvider& executors, const at::Tensor& flat, int64_t exchange,
                                            bool hierarchical, const std::string& mode);

// See RingExchange::step; differences travel in the packets of the original. The replicas are of the size of `flat`; a rank uses the part that it owns. On a single host
// with `hierarchical` the weights are averaged in full precision.
c10::intrusive_ptr<c10d::Work> exchangeInRing(ExecutorProvider& executors, const at::Tensor& flat,
                                              const RingReplicas& replicas, bool hierarchical);

// A round of the average that goes on while the ranks train, of a copy of `flat`. See AverageRound.
std::shared_ptr<AverageRound> startAverageRound(ExecutorProvider& executors, const at::Tensor& flat, bool wantsToEnd);

}  // namespace bagua::bucket_operations
