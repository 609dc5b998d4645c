// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/schedule_choice.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace bagua::rounds {
namespace {

constexpr int64_t kMostFragments = 4;
constexpr int64_t kShortestRound = 30;
// A delay of years, where a step took no time.
constexpr double kLongestExchange = 1e9;

int64_t roundedUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

void check(const ScheduleOptions& options) {
  const int64_t fragments = options.fragments.value_or(1);
  const int64_t delay = options.delay.value_or(0);
  static_cast<void>(Schedule(options.every.value_or(fragments * (std::max<int64_t>(delay, 0) + 1)), fragments, delay));
}

int64_t chooseFragments(const ScheduleOptions& options, int64_t pieces) {
  if (options.fragments) return *options.fragments;
  for (int64_t fragments = std::min(pieces, kMostFragments); fragments > 1; --fragments) {
    if (!options.every) return fragments;
    if (*options.every % fragments == 0 && options.delay.value_or(0) < *options.every / fragments) return fragments;
  }
  return 1;
}

Schedule chooseSchedule(const ScheduleOptions& options, int64_t fragments, const Measured& measured, int64_t begin) {
  // One step more, as some take longer than others.
  const auto needed = static_cast<int64_t>(std::ceil(std::clamp(measured.stepsOfExchange, 0.0, kLongestExchange))) + 1;
  if (options.every) {
    // A round that is too short for the line: steps wait.
    const int64_t delay = std::min(needed, *options.every / fragments - 1);
    return {*options.every, fragments, options.delay.value_or(delay), begin};
  }
  const int64_t delay = options.delay.value_or(needed);
  return {std::max(fragments * (delay + 1), roundedUp(kShortestRound, fragments)), fragments, delay, begin};
}

}  // namespace bagua::rounds
