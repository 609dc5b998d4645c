// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/step_tracker.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace bagua {
namespace {

using enum StepEvent;

constexpr StepEvent kAllEvents[] = {kFoundSkipped,  kForward, kBackwardBegins, kBackwardEnds,
                                    kOptimizerStep, kEnd,     kCheckpoint};

// What the algorithm is told in the course of events: 's' a step, 'x' a skipped one, 'b' the beginning of one.
std::string told(StepTracker& tracker, const std::vector<StepEvent>& events) {
  std::string text;
  for (const auto event : events) {
    const StepDuties duties = tracker.on(event);
    if (duties.beginSkipped) text += 'b';
    if (duties.skipped) text += 'x';
    if (duties.step) text += 's';
  }
  return text;
}

std::string told(const std::vector<StepEvent>& events) {
  StepTracker tracker;
  return told(tracker, events);
}

// The events of a step up to the optimizer's.
std::vector<StepEvent> backwardAnd(std::vector<StepEvent> events) {
  events.insert(events.begin(), {kForward, kBackwardBegins, kBackwardEnds});
  return events;
}

TEST(StepTracker, AStepThatIsTakenIsToldOnce) {
  EXPECT_EQ(told(backwardAnd({kOptimizerStep})), "s");
  EXPECT_EQ(told(backwardAnd({kCheckpoint, kEnd, kOptimizerStep, kEnd, kCheckpoint, kForward})), "s");
}

TEST(StepTracker, ASkippedStepIsToldAtTheNextForwardBackwardOrEnd) {
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kForward, kBackwardBegins})), "x");
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kBackwardBegins, kBackwardEnds})), "x");
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kEnd, kForward})), "x");
}

TEST(StepTracker, ABackwardAloneTellsNothing) {
  // It may be one under no_sync(), after which the gradients are not what the skipped step left.
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kBackwardBegins})), "");
}

TEST(StepTracker, WhatWasFoundSkippedIsToldBeforeTheStepThatTheOptimizerTakesAfterIt) {
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kOptimizerStep})), "xs");
}

TEST(StepTracker, ACheckpointHasTheSkippedStepBeginAndOwesTheRest) {
  StepTracker tracker;
  EXPECT_EQ(told(tracker, backwardAnd({kFoundSkipped, kCheckpoint})), "b");
  EXPECT_TRUE(tracker.owesSkippedStep());
  EXPECT_EQ(told(tracker, {kForward}), "x");
  EXPECT_FALSE(tracker.owesSkippedStep());

  StepTracker continued;
  continued.load(true);
  EXPECT_EQ(told(continued, {kForward, kBackwardBegins, kBackwardEnds, kOptimizerStep}), "xs");
}

TEST(StepTracker, WhatWasCountedAsSkippedCountsNotAgainIfTheOptimizerStepsAllTheSame) {
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kEnd, kOptimizerStep, kOptimizerStep})), "xs");
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kCheckpoint, kOptimizerStep, kOptimizerStep})), "bxs");
  // The step of the backward that follows is another.
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kEnd, kBackwardBegins, kOptimizerStep})), "xs");
  EXPECT_EQ(told(backwardAnd({kFoundSkipped, kCheckpoint, kBackwardBegins, kOptimizerStep})), "bxs");
}

TEST(StepTracker, AStepIsPendingFromTheEndOfABackwardUntilItIsTaken) {
  StepTracker tracker;
  EXPECT_FALSE(tracker.isPending());
  told(tracker, backwardAnd({}));
  EXPECT_TRUE(tracker.isPending());
  told(tracker, {kOptimizerStep});
  EXPECT_FALSE(tracker.isPending());
}

TEST(StepTracker, AForwardAnnouncesTheBackwardUntilThatHasEnded) {
  StepTracker tracker;
  EXPECT_FALSE(tracker.isAnnounced());
  told(tracker, {kForward, kOptimizerStep, kBackwardBegins});
  EXPECT_TRUE(tracker.isAnnounced());
  told(tracker, {kBackwardEnds});
  EXPECT_FALSE(tracker.isAnnounced());
}

TEST(StepTracker, InWhateverOrderThingsHappenASkippedStepIsToldOnceForEachThatWasFound) {
  // All orders of six events.
  constexpr int kLength = 6;
  constexpr int kKinds = static_cast<int>(std::size(kAllEvents));
  int orders = 1;
  for (int i = 0; i < kLength; ++i) orders *= kKinds;
  for (int order = 0; order < orders; ++order) {
    StepTracker tracker;
    int found = 0;
    int toldOf = 0;
    for (int place = 0, rest = order; place < kLength; ++place, rest /= kKinds) {
      const StepEvent event = kAllEvents[rest % kKinds];
      if (event == kFoundSkipped && tracker.isPending()) ++found;
      const StepDuties duties = tracker.on(event);
      toldOf += duties.skipped ? 1 : 0;
      ASSERT_EQ(found - toldOf, tracker.owesSkippedStep() ? 1 : 0) << "order " << order << ", event " << place;
    }
  }
}

}  // namespace
}  // namespace bagua
