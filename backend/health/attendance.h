// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "backend/operation/program_fingerprint.h"

namespace bagua {

// What a rank is doing on one executor, as it tells the others in a roll call: one for each program under way.
struct Activity {
  // One operation, and how long it has been under way, or over.
  struct Moment {
    bool exists = false;
    uint64_t sequence = 0;
    uint64_t hash = 0;
    std::chrono::milliseconds age{0};
    std::string text;
  };

  // The executor: what it is called on every rank.
  std::string executor;
  Moment completed;
  Moment current;

  // "has nothing under way, last completed bagua:all_reduce #16 (Float[5]) 4.1 s ago"
  [[nodiscard]] std::string describe() const;
};

Activity::Moment momentOf(const ProgramFingerprint& program, std::chrono::steady_clock::time_point since);

// On their way through the store. What does not read as activities is left out.
std::string encode(const std::vector<Activity>& activities);
std::vector<Activity> decodeActivities(const std::string& text);

// Who has come to an operation, by what the ranks have answered.
struct Attendance {
  // In the operation, like the rank that asks.
  std::vector<int> waiting;
  // Not in it: rank -> what it does instead.
  std::map<int, std::string> absent;
  // No answer.
  std::vector<int> silent;

  // " Not there: rank 2 (...), rank 3 (...). Waiting as well: rank 1." Empty where nobody is missing.
  [[nodiscard]] std::string describe() const;
};

// `isMessage`: it has no place in the order of programs, by which one could tell who has passed it.
Attendance attendanceOf(const ProgramFingerprint& operation, bool isMessage, const std::string& executor,
                        const std::map<int, std::vector<Activity>>& answers, const std::vector<int>& silent);

}  // namespace bagua
