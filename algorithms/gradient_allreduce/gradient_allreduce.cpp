// SPDX-License-Identifier: Apache-2.0
#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"

namespace bagua {
namespace {

// Mean of the gradients in full precision: what DistributedDataParallel does by itself.
class GradientAllReduce final : public Algorithm, public ReducesToParts {
 public:
  explicit GradientAllReduce(bool average) : average_(average) {}

  void reduce(Bucket& bucket, Communicator& communicator) override {
    const Stage stage(bucket.seconds, stages::kAllReduce);
    communicator.allReduce(bucket.flat, average_ ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }

  void reduceToParts(Bucket& bucket, at::Tensor& own, Communicator& communicator) override {
    const Stage stage(bucket.seconds, stages::kReduceScatter);
    communicator.reduceScatter(own, bucket.flat, average_ ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }

  [[nodiscard]] ReduceTraits traits() const override {
    return {.bucketsMayOverlap = true, .isStateless = true, .isReplayable = true, .averagesSparse = average_};
  }

 private:
  const bool average_;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "gradient_allreduce",
    .summary = "Mean of the gradients in full precision.",
    .position = 1,
    .agreement = Agreement::kIdentical,
    .options = {{"hierarchical", false, "Accepted for compatibility: a full-precision sum is the same either way."},
                {"average", true, "Mean over the ranks; False: sum."}},
    .create = [](const Options& options) { return std::make_unique<GradientAllReduce>(options.get<bool>("average")); },
})

}  // namespace bagua
