// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "algorithms/shared/rounds/schedule_choice.h"
#include "algorithms/step_context.h"

namespace bagua::rounds {

// Finds out in the first steps how long one takes, and how many of them an exchange lasts that begins after some. By
// steps, not by a clock on another thread or device: what counts is how far the training is when the exchange is over.
class Measurement {
 public:
  using Exchange = std::function<c10::intrusive_ptr<c10d::Work>()>;

  // Called at the end of every step. `begin` starts an exchange. Returns what all ranks have found in the step after
  // the last that it needs. They compare it in between, first those of the group, and in the next step those that hold
  // other parts of the weights: a rank whose optimizer skips such a step takes part only when its next forward begins,
  // and until then no other rank waits for it. Collective.
  std::optional<Measured> afterStep(StepContext& context, const Exchange& begin);
  // Waits for what is under way.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] double stepSeconds() const;
  void beginAgreement(StepContext& context);
  // Null where there are no other parts.
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> beginAgreementAmongShards(StepContext& context);

  int64_t steps_ = 0;
  Clock::time_point lastEnd_{};
  std::vector<double> seconds_;
  c10::intrusive_ptr<c10d::Work> exchange_;
  // How many steps had ended when the exchange was found to be over.
  std::optional<double> stepsOfExchange_;
  c10::intrusive_ptr<c10d::Work> agreement_;
  // The ranks that hold other parts, if there are any, have been asked.
  bool hasAskedShards_ = false;
  // What it makes the same on all ranks: see beginAgreement().
  at::Tensor agreed_;
};

}  // namespace bagua::rounds
