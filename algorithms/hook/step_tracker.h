// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bagua {

// Where the last synchronised backward stands between its end and what becomes of it.
enum class StepPhase : uint8_t {
  // No backward waits for the optimizer.
  kIdle,
  // A backward has ended, and the optimizer has not taken its step.
  kPending,
  // That step was skipped, and the algorithm has not been told.
  kSkipped,
  // The same, and a checkpoint has had the algorithm begin the skipped step.
  kSkippedAndBegun,
  // An end of training has counted the step as skipped. If the optimizer takes it all the same, it does not count
  // again.
  kCounted,
};

enum class StepEvent : uint8_t {
  // The gradients of the pending step are found to be gone, or not finite where nothing but a skipped step follows.
  kFoundSkipped,
  // A forward whose backward will be synchronised is about to begin.
  kForward,
  // A backward begins, before it adds to any gradient.
  kBackwardBegins,
  // A synchronised backward has ended.
  kBackwardEnds,
  // The optimizer has taken a step.
  kOptimizerStep,
  // An end, after which no forward shows whether a step was skipped: remove(), synchronize() and abort().
  kEnd,
  // A checkpoint is taken.
  kCheckpoint,
};

// What the algorithm is to be told, in this order.
struct StepDuties {
  bool beginSkipped = false;
  bool skipped = false;
  bool step = false;

  bool operator==(const StepDuties&) const = default;
};

// Which step is where: the states are StepPhase, and on() is their table. An algorithm is told of every step once,
// whether the optimizer takes it or not, and never while a checkpoint that it is part of would miss it.
class StepTracker {
 public:
  // The event happens; returns what follows of it.
  StepDuties on(StepEvent event);

  [[nodiscard]] StepPhase phase() const { return phase_; }
  [[nodiscard]] bool isPending() const { return phase_ == StepPhase::kPending; }
  // Whether a step was skipped of which the algorithm has not been told.
  [[nodiscard]] bool owesSkippedStep() const {
    return phase_ == StepPhase::kSkipped || phase_ == StepPhase::kSkippedAndBegun;
  }
  // Whether the coming backward is one of a forward that the algorithm has seen.
  [[nodiscard]] bool isAnnounced() const { return isAnnounced_; }

  // What a checkpoint says: whether it was taken before a skipped step was told.
  void load(bool owesSkippedStep) { phase_ = owesSkippedStep ? StepPhase::kSkipped : StepPhase::kIdle; }

 private:
  StepPhase phase_ = StepPhase::kIdle;
  bool isAnnounced_ = false;
};

}  // namespace bagua
