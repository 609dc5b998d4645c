// SPDX-License-Identifier: Apache-2.0
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "algorithms/shared/weight_exchanges/peer_average.h"
#include "algorithms/shared/weights.h"

namespace bagua {
namespace {

// Averages weights, not gradients. The exchange starts before forward and has until the end of backward; then the
// average replaces the weights, and the optimizer applies the rank's own gradient, taken at the old weights, to it.
class Decentralized final : public Algorithm, public ActsOnWeights, public KeepsState {
 public:
  Decentralized(PeerAverage average, int64_t interval) : average_(average), interval_(interval) {
    TORCH_CHECK_VALUE(interval >= 1, "bagua: communication_interval must be at least 1, got ", interval);
  }

  void useModel(const StepContext& context) override { average_.check(context.topology()); }

  void reduce(Bucket& /*bucket*/, Communicator& /*communicator*/) override {
    TORCH_INTERNAL_ASSERT(false, "decentralized leaves gradients alone");
  }

  [[nodiscard]] ReduceTraits traits() const override { return {.isReplayable = interval_ == 1 && !average_.pairs()}; }
  [[nodiscard]] int64_t commonStep() const override { return step_; }

  void beforeForward(StepContext& context) override {
    if (step_ % interval_ != 0) return;
    if (buckets_.empty()) buckets_ = weightBuckets(context.parameters());
    const int64_t version = versionOf(context.parameters());
    if (exchange_) {
      // Several forwards before one backward. Weights that were loaded or stepped in between make the exchange stale.
      if (exchange_->version == version) return;
      exchange_->work->wait(kNoTimeout);
    }
    std::vector<at::Tensor> averages = packAll(buckets_);
    auto work = context.submit(
        "bagua:average_weights", averages, StepContext::Wait::kLater,
        [average = average_, number = exchanges_, averages](Communicator& communicator, StageSeconds& seconds) mutable {
          for (auto& flat : averages) average.reduce(flat, number, seconds, communicator);
        });
    exchange_ = Exchange{std::move(work), averages, version};
  }

  void afterBackward(StepContext& context) override {
    ++step_;
    if (!exchange_) return;
    const Exchange exchange = *std::exchange(exchange_, std::nullopt);
    {
      RECORD_USER_SCOPE("bagua:wait_for_weights");
      exchange.work->wait(kNoTimeout);
    }
    unpackAll(buckets_, exchange.averages);
    ++exchanges_;
    context.countRound();
  }

  void synchronize(StepContext& context) override { averageWeights(context); }

  [[nodiscard]] int64_t stateBytes() const override { return 0; }
  [[nodiscard]] AlgorithmState state() const override { return shared(); }
  [[nodiscard]] AlgorithmState shared() const override {
    return {{"step", counterTensor(step_)}, {"exchanges", counterTensor(exchanges_)}};
  }

  void load(const AlgorithmState& state, StepContext& /*context*/) override {
    checkThatAllAreTaken(state, [](const std::string& name) { return name == "step" || name == "exchanges"; });
    const int64_t step = counterOf(state, "step");
    exchanges_ = counterOf(state, "exchanges");
    step_ = step;
    exchange_.reset();
  }

 private:
  struct Exchange {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> averages;
    // Of the weights that it started from.
    int64_t version;
  };

  const PeerAverage average_;
  const int64_t interval_;
  std::vector<WeightBucket> buckets_;
  // Synchronised backwards so far, and exchanges among them.
  int64_t step_ = 0;
  int64_t exchanges_ = 0;
  std::optional<Exchange> exchange_;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "decentralized",
    .summary = "Average of the weights, exchanged during forward and backward; gradients stay local.",
    .position = 3,
    .agreement = Agreement::kEventual,
    .optimizer = "Optimizer",
    .options = {{"hierarchical", true,
                 "Hosts are the participants, after an average inside each; False: every rank is one."},
                {"peer_selection_mode", std::string("all"),
                 "'all': average of all participants; 'shift_one': of two, another pair in every exchange."},
                {"communication_interval", int64_t{1}, "Exchange in every n-th step."}},
    .create =
        [](const Options& options) {
          const PeerAverage average(options.get<bool>("hierarchical"), options.get<std::string>("peer_selection_mode"));
          return std::make_unique<Decentralized>(average, options.get<int64_t>("communication_interval"));
        },
})

}  // namespace bagua
