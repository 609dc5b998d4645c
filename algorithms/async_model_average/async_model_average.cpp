// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "algorithms/shared/weight_exchanges/average_round.h"
#include "algorithms/shared/weights.h"
#include "backend/operation/timeouts.h"

namespace bagua {
namespace {

using Clock = AverageRound::Clock;
using std::chrono::milliseconds;

// Averages the weights in rounds that no rank waits for. A round begins with a snapshot at the start of a forward; when
// the average has come in, the start of a later forward adds what it differs by from the snapshot, so that the progress
// made meanwhile is kept. Only there are weights read or changed: no lock, hence no deadlock, and evaluation, an
// unfinished step or a checkpoint never see half a change. Ranks may take different numbers of steps.
//
// All ranks take part in every round. It carries whether a rank is in abort(); the round in which all are is the last.
class AsyncModelAverage final : public Algorithm, public ActsOnWeights, public RunsInBackground, public KeepsState {
 public:
  AsyncModelAverage(const std::string& mode, milliseconds interval, int64_t warmupSteps)
      : interval_(interval), warmupSteps_(warmupSteps) {
    TORCH_CHECK_VALUE(mode == "all", "bagua: algorithm 'async' takes peer_selection_mode 'all', got '", mode, "'");
    TORCH_CHECK_VALUE(interval.count() > 0, "bagua: sync_interval_ms must be greater than 0, got ", interval.count());
    TORCH_CHECK_VALUE(warmupSteps >= 0, "bagua: warmup_steps must not be negative, got ", warmupSteps);
  }

  [[nodiscard]] GradientScope gradientScope() const override {
    return isWarmingUp() ? GradientScope::kAllRanks : GradientScope::kNone;
  }
  void reduce(Bucket& bucket, Communicator& communicator) override {
    const Stage stage(bucket.seconds, stages::kAllReduce);
    communicator.allReduce(bucket.flat, c10d::ReduceOp::AVG);
  }

  [[nodiscard]] int64_t commonStep() const override { return isWarmingUp() ? step_ : 0; }

  void beforeForward(StepContext& context) override {
    if (isWarmingUp() || context.size() == 1) return;
    finishWarmup(context);
    if (isPaused_) return;
    if (round_ && !round_->isCompleted()) return;
    if (round_) finishRound(context);
    if (Clock::now() >= nextRound_) startRound(context, /*isAborting=*/false);
  }

  void afterBackward(StepContext& /*context*/) override { ++step_; }

  bool abort(StepContext& context) override {
    if (isPaused_ || context.size() == 1) return !std::exchange(isPaused_, true);
    context.checkWeightsAreFree("abort()");
    if (!isWarmingUp()) finishWarmup(context);
    finishRounds(context, Clock::time_point::max());
    return true;
  }

  void endWithin(StepContext& context, milliseconds limit) override {
    // Before the first round there is nothing to end.
    if (isPaused_ || context.size() == 1 || !hasStarted_) return;
    finishRounds(context, Clock::now() + limit);
  }

  bool resume(StepContext& /*context*/) override {
    if (isPaused_) nextRound_ = Clock::now();
    return std::exchange(isPaused_, false);
  }

  void synchronize(StepContext& context) override {
    const bool wasPaused = isPaused_;
    abort(context);
    // Those who trained on after an earlier abort() are apart.
    averageWeights(context);
    if (!wasPaused) resume(context);
  }

  [[nodiscard]] int64_t stateBytes() const override { return 0; }
  [[nodiscard]] AlgorithmState state() const override { return shared(); }
  [[nodiscard]] AlgorithmState shared() const override {
    const auto left = std::chrono::duration_cast<milliseconds>(nextRound_ - Clock::now());
    return {{"step", counterTensor(step_)},
            {"has_started", counterTensor(hasStarted_ ? 1 : 0)},
            {"is_paused", counterTensor(isPaused_ ? 1 : 0)},
            {"milliseconds_to_round", counterTensor(std::max<int64_t>(left.count(), 0))}};
  }

  void load(const AlgorithmState& state, StepContext& /*context*/) override {
    // A state that is refused changes nothing.
    const std::set<std::string> names = {"step", "has_started", "is_paused", "milliseconds_to_round"};
    checkThatAllAreTaken(state, [&](const std::string& name) { return names.contains(name); });
    const int64_t step = counterOf(state, "step");
    const bool hasStarted = counterOf(state, "has_started") != 0;
    const bool isPaused = counterOf(state, "is_paused") != 0;
    const milliseconds left = std::min(milliseconds(counterOf(state, "milliseconds_to_round")), interval_);
    step_ = step;
    hasStarted_ = hasStarted;
    isPaused_ = isPaused;
    // It knows nothing of the weights that were loaded.
    isRoundStale_ = true;
    nextRound_ = Clock::now() + left;
  }

 private:
  [[nodiscard]] bool isWarmingUp() const { return step_ < warmupSteps_; }

  // Once, whatever comes first after warm-up: a rank may be in abort() while another goes on training.
  void finishWarmup(StepContext& context) {
    if (hasStarted_) return;
    if (warmupSteps_ > 0) broadcastWeights(context);
    hasStarted_ = true;
  }

  void startRound(StepContext& context, bool isAborting) {
    if (buckets_.empty()) buckets_ = weightBuckets(context.parameters());
    isRoundStale_ = false;
    round_.emplace(packAll(buckets_), isAborting,
                   [&context](const std::vector<at::Tensor>& tensors, StepContext::Task task) {
                     return context.submitInBackground("bagua:average_weights", tensors, std::move(task));
                   });
  }

  // Until all ranks are here.
  void finishRounds(StepContext& context, Clock::time_point deadline) {
    if (round_) finishRound(context, deadline);
    bool isLast = false;
    while (!isLast) {
      startRound(context, /*isAborting=*/true);
      isLast = finishRound(context, deadline);
    }
    isPaused_ = true;
  }

  // Whether it was the last. Nobody has moved on from the snapshot then: the average itself makes all ranks equal.
  bool finishRound(StepContext& context, Clock::time_point deadline = Clock::time_point::max()) {
    AverageRound round = *std::exchange(round_, std::nullopt);
    const bool isLast = round.wait(deadline);
    for (size_t i = 0; i < buckets_.size() && !isRoundStale_; ++i) {
      if (isLast) {
        buckets_[i].unpack(round.average(i));
      } else {
        buckets_[i].add(round.takeChange(i));
      }
    }
    nextRound_ = round.end() + interval_;
    context.countRound();
    return isLast;
  }

  const milliseconds interval_;
  const int64_t warmupSteps_;
  std::vector<WeightBucket> buckets_;
  // Synchronised backwards so far.
  int64_t step_ = 0;
  // Whether warm-up has been left behind.
  bool hasStarted_ = false;
  bool isPaused_ = false;
  Clock::time_point nextRound_ = Clock::now();
  std::optional<AverageRound> round_;
  // The weights were loaded since it began: its outcome is not to be added to them.
  bool isRoundStale_ = false;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "async",
    .summary = "Weights averaged in the background, at most every sync_interval_ms; no rank waits for another.",
    .position = 6,
    .agreement = Agreement::kEventual,
    .optimizer = "Optimizer",
    .runsInBackground = true,
    .stepsMayDiffer = true,
    .options = {{"peer_selection_mode", std::string("all"), "'all': average over all ranks."},
                {"sync_interval_ms", int64_t{500}, "Milliseconds between the end of a round and the next."},
                {"warmup_steps", int64_t{0}, "Steps that average gradients before that."}},
    .create =
        [](const Options& options) {
          return std::make_unique<AsyncModelAverage>(
              options.get<std::string>("peer_selection_mode"),
              limitedTimeout(milliseconds(options.get<int64_t>("sync_interval_ms"))),
              options.get<int64_t>("warmup_steps"));
        },
})

}  // namespace bagua
