// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <memory>
#include <mutex>

#include "algorithms/blocks.h"
#include "algorithms/bytegrad/compressed_mean.h"
#include "algorithms/registry.h"

namespace bagua {
namespace {

// Adam with 8-bit messages. While the optimizer warms up the gradients are averaged in full precision; after that each
// rank updates the momentum by its own gradient, the momenta are averaged with 8-bit messages, and the optimizer, whose
// variance is frozen, finds them in place of the gradients.
class QAdam final : public Algorithm {
 public:
  explicit QAdam(bool hierarchical) : hierarchical_(hierarchical) {}

  void useMomenta(std::vector<Momentum> momenta) override {
    auto shared = std::make_shared<const std::vector<Momentum>>(std::move(momenta));
    const std::lock_guard<std::mutex> lock(mutex_);
    momenta_.swap(shared);
  }

  void reduce(Bucket& bucket, Communicator& communicator) override {
    const auto momenta = currentMomenta();
    if (momenta->empty()) {
      const Stage stage(bucket.seconds, "allreduce");
      communicator.allReduce(bucket.flat, c10d::ReduceOp::AVG);
      return;
    }
    {
      const Stage stage(bucket.seconds, "update_momentum");
      for (const auto& entry : bucket.entries) updateMomentum(entry, *momenta);
    }
    bytegrad::reduceCompressed(bucket, {.hierarchical = hierarchical_}, communicator);
  }

  [[nodiscard]] bool bucketsMayOverlap() const override { return true; }

 private:
  // The gradient's place takes the momentum that it leads to. The optimizer's own copy stays until its step: a step
  // that is skipped leaves no trace.
  static void updateMomentum(const BucketEntry& entry, const std::vector<Momentum>& momenta) {
    TORCH_INTERNAL_ASSERT(entry.parameter >= 0 && entry.parameter < static_cast<int64_t>(momenta.size()));
    const Momentum& momentum = momenta[entry.parameter];
    const auto update = [&momentum](const at::Tensor& gradient, const at::Tensor& value) {
      gradient.copy_(value.mul(momentum.decay).add_(gradient, 1 - momentum.decay));
    };
    const bool areAlike =
        entry.gradient.is_non_overlapping_and_dense() && entry.gradient.strides() == momentum.value.strides();
    if (!areAlike) return update(entry.gradient, momentum.value);
    const int64_t numel = entry.gradient.numel();
    const at::Tensor gradient = entry.gradient.as_strided({numel}, {1});
    const at::Tensor value = momentum.value.as_strided({numel}, {1});
    inBlocks(numel, gradient.device(), [&](int64_t begin, int64_t length) {
      update(gradient.narrow(0, begin, length), value.narrow(0, begin, length));
    });
  }

  std::shared_ptr<const std::vector<Momentum>> currentMomenta() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return momenta_;
  }

  const bool hierarchical_;
  std::mutex mutex_;
  // Replaced before a forward, while a program of a step that failed may still read the old ones.
  std::shared_ptr<const std::vector<Momentum>> momenta_ = std::make_shared<const std::vector<Momentum>>();
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "qadam",
    .summary = "Adam whose momentum travels with 8 bits once its variance is frozen.",
    .position = 5,
    .agreement = Agreement::kIdentical,
    .optimizer = "QAdamOptimizer",
    .options = {{"hierarchical", true,
                 "After warm-up: full precision inside a host, 8 bits between hosts (on a single host nothing is "
                 "compressed); False: 8 bits between all ranks."}},
    .create = [](const Options& options) { return std::make_unique<QAdam>(options.get<bool>("hierarchical")); },
})

}  // namespace bagua
