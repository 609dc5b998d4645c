// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/step_tracker.h"

#include <array>

namespace bagua {
namespace {

using enum StepPhase;

struct Transition {
  StepPhase next;
  StepDuties duties = {};
};

constexpr StepDuties kTellSkipped{.skipped = true};
constexpr StepDuties kTellStep{.step = true};
constexpr StepDuties kTellBoth{.skipped = true, .step = true};
constexpr StepDuties kBegin{.beginSkipped = true};

constexpr size_t kEvents = 7;

// A row for each phase, a column for each event, in the order of their declarations.
constexpr std::array<std::array<Transition, kEvents>, 5> kTable = {{
    // kIdle
    {{{kIdle}, {kIdle}, {kIdle}, {kPending}, {kIdle, kTellStep}, {kIdle}, {kIdle}}},
    // kPending
    {{{kSkipped}, {kPending}, {kPending}, {kPending}, {kIdle, kTellStep}, {kPending}, {kPending}}},
    // kSkipped
    {{{kSkipped},
      {kIdle, kTellSkipped},
      {kSkipped},
      {kPending, kTellSkipped},
      {kIdle, kTellBoth},
      {kCounted, kTellSkipped},
      {kSkippedAndBegun, kBegin}}},
    // kSkippedAndBegun: the optimizer's step, if it comes, is the one that has begun. A backward starts another.
    {{{kSkippedAndBegun},
      {kCounted, kTellSkipped},
      {kSkipped},
      {kPending, kTellSkipped},
      {kIdle, kTellSkipped},
      {kCounted, kTellSkipped},
      {kSkippedAndBegun, kBegin}}},
    // kCounted
    {{{kCounted}, {kCounted}, {kIdle}, {kPending}, {kIdle}, {kCounted}, {kCounted}}},
}};

}  // namespace

StepDuties StepTracker::on(StepEvent event) {
  if (event == StepEvent::kForward) isAnnounced_ = true;
  if (event == StepEvent::kBackwardEnds) isAnnounced_ = false;
  const auto& [next, duties] = kTable.at(static_cast<size_t>(phase_)).at(static_cast<size_t>(event));
  phase_ = next;
  return duties;
}

}  // namespace bagua
