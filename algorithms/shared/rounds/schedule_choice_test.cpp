// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/schedule_choice.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace bagua::rounds {
namespace {

std::vector<int64_t> chosen(const ScheduleOptions& options, double stepsOfExchange, int64_t pieces = 12) {
  const int64_t fragments = chooseFragments(options, pieces);
  const auto schedule =
      chooseSchedule(options, fragments, {.stepSeconds = 0.1, .stepsOfExchange = stepsOfExchange}, 16);
  return {schedule.every(), schedule.fragments(), schedule.delay()};
}

using Numbers = std::vector<int64_t>;

TEST(ScheduleChoice, WaitsForNothingWithTheShortestRound) {
  // delay = T / t rounded up, plus 1; sync_every = fragments (delay + 1).
  EXPECT_EQ(chosen({}, 6.2), (Numbers{36, 4, 8}));
  EXPECT_EQ(chosen({}, 119.5), (Numbers{488, 4, 121}));
  // On a fast line, no more rounds than those for which the outer optimizer's defaults were found.
  EXPECT_EQ(chosen({}, 0.01), (Numbers{32, 4, 2}));
  EXPECT_EQ(chosen({}, 0.01, 1), (Numbers{30, 1, 2}));
}

TEST(ScheduleChoice, KeepsWhatTheUserHasSaid) {
  EXPECT_EQ(chosen({.every = 100}, 6.2), (Numbers{100, 4, 8}));
  EXPECT_EQ(chosen({.every = 30}, 6.2), (Numbers{30, 3, 8}));
  EXPECT_EQ(chosen({.fragments = 2}, 40), (Numbers{84, 2, 41}));
  EXPECT_EQ(chosen({.delay = 20}, 1), (Numbers{84, 4, 20}));
  EXPECT_EQ(chosen({.every = 40, .delay = 15}, 1), (Numbers{40, 2, 15}));
  EXPECT_EQ(chosen({.every = 40, .fragments = 4}, 1), (Numbers{40, 4, 2}));
}

TEST(ScheduleChoice, ARoundThatIsTooShortForTheLineWaitsForItsExchange) {
  EXPECT_EQ(chosen({.every = 40}, 300), (Numbers{40, 4, 9}));
  EXPECT_EQ(chosen({.every = 1}, 300), (Numbers{1, 1, 0}));
  EXPECT_EQ(chosen({.every = 40, .fragments = 4}, std::numeric_limits<double>::infinity()), (Numbers{40, 4, 9}));
}

TEST(ScheduleChoice, CountsFromTheStepAfterWhichItWasMade) {
  const auto schedule = chooseSchedule({.every = 4, .fragments = 2, .delay = 1}, 2, {}, 16);
  EXPECT_EQ(schedule.synchronisedAfter(16), std::nullopt);
  EXPECT_EQ(schedule.takenAfter(17), 0);
  EXPECT_EQ(schedule.synchronisedAfter(18), 0);
  EXPECT_EQ(schedule.synchronisedAfter(20), 1);
}

TEST(ScheduleChoice, WhatNoScheduleCouldHaveIsRefused) {
  EXPECT_THROW(check({.every = 0}), c10::ValueError);
  EXPECT_THROW(check({.fragments = 0}), c10::ValueError);
  EXPECT_THROW(check({.delay = -1}), c10::ValueError);
  EXPECT_THROW(check({.every = 9, .fragments = 2}), c10::ValueError);
  EXPECT_THROW(check({.every = 9, .delay = 9}), c10::ValueError);
  EXPECT_NO_THROW(check(ScheduleOptions{}));
  EXPECT_NO_THROW(check({.every = 9, .delay = 8}));
  EXPECT_NO_THROW(check({.fragments = 3, .delay = 5}));
}

}  // namespace
}  // namespace bagua::rounds
