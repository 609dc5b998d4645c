// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "algorithms/shared/cache_blocks.h"
#include "algorithms/shared/compressed/coded_gradients.h"
#include "kernels/device_ways.h"
#include "kernels/loops/adam/adam.h"

namespace bagua {
namespace {

// Adam with 8-bit messages. While the optimizer warms up the gradients are averaged in full precision; after that each
// rank updates the momentum by its own gradient, the momenta are averaged with 8-bit messages, and the optimizer, whose
// variance is frozen, finds them in place of the gradients.
class QAdam final : public compressed::CodedGradients, public UsesMomenta {
 public:
  using CodedGradients::CodedGradients;

  void useMomenta(std::vector<Momentum> momenta) override {
    auto shared = std::make_shared<const std::vector<Momentum>>(std::move(momenta));
    const std::lock_guard<std::mutex> lock(mutex_);
    momenta_.swap(shared);
  }

  void reduce(Bucket& bucket, Communicator& communicator) override {
    const auto momenta = currentMomenta();
    if (momenta->empty()) {
      const Stage stage(bucket.seconds, stages::kAllReduce);
      communicator.allReduce(bucket.flat, c10d::ReduceOp::AVG);
      return;
    }
    {
      const Stage stage(bucket.seconds, stages::kUpdateMomentum);
      updateMomenta(bucket.entries, *momenta);
    }
    CodedGradients::reduce(bucket, communicator);
  }

  void reduceToParts(Bucket& /*bucket*/, at::Tensor& /*own*/, Communicator& /*communicator*/) override {
    TORCH_CHECK_VALUE(false, "bagua: qadam has momenta of whole parameters, and reduces nothing to parts");
  }

  [[nodiscard]] ReduceTraits traits() const override {
    ReduceTraits traits = CodedGradients::traits();
    // Another step may be one of the warm-up, or use other momenta.
    traits.isStateless = traits.isReplayable = false;
    return traits;
  }

 private:
  struct Tensors {
    std::vector<at::Tensor> gradients, values;
  };

  // The gradient's place takes the momentum that it leads to. The optimizer's own copy stays until its step: a step
  // that is skipped leaves no trace.
  static void updateMomenta(const BucketEntries& entries, const std::vector<Momentum>& momenta) {
    std::map<double, Tensors> byDecay;
    for (const auto& [parameter, gradient, isUsed] : entries) {
      TORCH_INTERNAL_ASSERT(parameter >= 0 && parameter < static_cast<int64_t>(momenta.size()));
      const auto& [value, decay] = momenta[parameter];
      if (adam::areAlike({gradient, value})) {
        adam::makeMomentum(gradient, value, decay);
      } else if (worksOnCpu(gradient) && gradient.is_contiguous() && value.is_contiguous()) {
        updateInBlocks(gradient, value, decay);
      } else {
        byDecay[decay].gradients.push_back(gradient);
        byDecay[decay].values.push_back(value);
      }
    }
    // Many at once: on a GPU a kernel for each takes longer to start than to run.
    for (const auto& [decay, tensors] : byDecay) {
      const auto updated = at::_foreach_mul(tensors.values, decay);
      at::_foreach_add_(updated, tensors.gradients, 1 - decay);
      at::_foreach_copy_(tensors.gradients, updated);
    }
  }

  // bfloat16 and half.
  static void updateInBlocks(const at::Tensor& gradient, const at::Tensor& value, double decay) {
    const at::Tensor flatGradient = gradient.view(-1);
    const at::Tensor flatValue = value.view(-1);
    inBlocks(gradient.numel(), gradient.device(), [&](int64_t begin, int64_t length) {
      const at::Tensor block = flatGradient.narrow(0, begin, length);
      block.copy_(flatValue.narrow(0, begin, length).mul(decay).add_(block, 1 - decay));
    });
  }

  std::shared_ptr<const std::vector<Momentum>> currentMomenta() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return momenta_;
  }

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
                 "compressed); False: 8 bits between all ranks."},
                {"codec", std::string(compressed::kDefaultCodec),
                 "One of bagua.available_codecs(). With '1bit' and error_feedback it is 1-bit Adam."},
                {"error_feedback", false, "Whether what coding leaves behind is added to the next step's momentum."},
                Guard::option()},
    .create = [](const Options& options) -> std::unique_ptr<Algorithm> {
      return std::make_unique<QAdam>(compressed::Selection::ofOne(options.get<std::string>("codec")),
                                     compressed::CodedGradientsOptions{
                                         .mean = {.hierarchical = options.get<bool>("hierarchical")},
                                         .feedback = compressed::FeedbackChoice(options.get<bool>("error_feedback"))},
                                     Guard::modeOf(options));
    },
})

}  // namespace bagua
