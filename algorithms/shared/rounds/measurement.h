// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "algorithms/shared/rounds/schedule_choice.h"
#include "algorithms/step_context.h"

namespace bagua::rounds {

// Finds out in the first steps how long one takes, and how many of them an exchange lasts that begins after some. By
// steps, not by a clock on another thread or device: what counts is how far the training is when the exchange is over.
// But a step that has waited, as for an evaluation or a checkpoint, counts as those that would have fit into it.
class Measurement {
 public:
  using Clock = std::chrono::steady_clock;
  // When an exchange was over, written before its work is completed. The epoch where that is not known, as on a device.
  using End = std::atomic<Clock::time_point>;
  using Exchange = std::function<c10::intrusive_ptr<c10d::Work>(std::shared_ptr<End> end)>;

  // Called at the end of every step. `begin` starts an exchange. Returns what all ranks have found in the step after
  // the last that it needs. They compare it in between, first those of the group, and in the next step those that hold
  // other parts of the weights: a rank whose optimizer skips such a step takes part only when its next forward begins,
  // and until then no other rank waits for it. Collective.
  std::optional<Measured> afterStep(StepContext& context, const Exchange& begin);
  // Waits for what is under way.
  void stop();

 private:
  [[nodiscard]] double stepSeconds() const;
  // How many steps the last one counts as.
  [[nodiscard]] double stepsBetween(Clock::time_point begin, Clock::time_point end) const;
  void beginAgreement(StepContext& context);
  // Null where there are no other parts.
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> beginAgreementAmongShards(StepContext& context);

  int64_t steps_ = 0;
  Clock::time_point lastEnd_{};
  std::vector<double> seconds_;
  c10::intrusive_ptr<c10d::Work> exchange_;
  std::shared_ptr<End> exchangeEnd_ = std::make_shared<End>();
  double stepsBeside_ = 0;
  // How many steps the exchange has lasted: stepsBeside_ when it was found to be over.
  std::optional<double> stepsOfExchange_;
  c10::intrusive_ptr<c10d::Work> agreement_;
  // The ranks that hold other parts, if there are any, have been asked.
  bool hasAskedShards_ = false;
  // What it makes the same on all ranks: see beginAgreement().
  at::Tensor agreed_;
};

}  // namespace bagua::rounds
