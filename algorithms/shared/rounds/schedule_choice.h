// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "algorithms/shared/rounds/schedule.h"

namespace bagua::rounds {

// What a user says of a schedule, as in Schedule; what is left out is chosen.
struct ScheduleOptions {
  std::optional<int64_t> every = {};
  std::optional<int64_t> fragments = {};
  std::optional<int64_t> delay = {};

  [[nodiscard]] bool isWhole() const { return every && fragments && delay; }
};

// Throws ValueError where no schedule could have what was said.
void check(const ScheduleOptions& options);

// Of a model that can be cut into `pieces`: one that is exchanged while another is trained hides the line, and more
// than four only cost messages.
int64_t chooseFragments(const ScheduleOptions& options, int64_t pieces);

// What the first steps have shown, the same on all ranks.
struct Measured {
  // A step that communicates nothing.
  double stepSeconds = 0;
  // The exchange of the longest fragment lasts so many of them, while training goes on.
  double stepsOfExchange = 0;
};

// The shortest schedule in which no step waits for a fragment, if that is left open; never shorter than the rounds for
// which the outer optimizer's defaults were found. Steps are counted from the one after `begin`.
Schedule chooseSchedule(const ScheduleOptions& options, int64_t fragments, const Measured& measured, int64_t begin);

}  // namespace bagua::rounds
