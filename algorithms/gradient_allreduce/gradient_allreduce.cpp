// SPDX-License-Identifier: Apache-2.0
#include "algorithms/registry.h"

namespace bagua {
namespace {

// Mean of the gradients in full precision: what DistributedDataParallel does by itself.
class GradientAllReduce final : public Algorithm {
 public:
  explicit GradientAllReduce(bool average) : average_(average) {}

  void reduce(Bucket& bucket, Communicator& communicator) override {
    const Stage stage(bucket.seconds, "allreduce");
    communicator.allReduce(bucket.flat, average_ ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }

  [[nodiscard]] bool bucketsMayOverlap() const override { return true; }
  [[nodiscard]] bool keepsNothing() const override { return true; }
  [[nodiscard]] bool isReplayable() const override { return true; }
  [[nodiscard]] bool averages() const override { return average_; }

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
