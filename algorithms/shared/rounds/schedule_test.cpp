// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/schedule.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace bagua::rounds {
namespace {

using ::testing::HasSubstr;

// Step -> fragment, of the first `steps`.
std::map<int64_t, int64_t> synchronised(const Schedule& schedule, int64_t steps) {
  std::map<int64_t, int64_t> found;
  for (int64_t step = 0; step <= steps; ++step) {
    if (const auto fragment = schedule.synchronisedAfter(step)) found.emplace(step, *fragment);
  }
  return found;
}

TEST(Schedule, FragmentsAreSynchronisedInTurnAndEachOnceInARound) {
  EXPECT_EQ(synchronised(Schedule(6, 2, 0), 12), (std::map<int64_t, int64_t>{{3, 0}, {6, 1}, {9, 0}, {12, 1}}));
  EXPECT_EQ(synchronised(Schedule(4, 1, 0), 9), (std::map<int64_t, int64_t>{{4, 0}, {8, 0}}));
  EXPECT_EQ(synchronised(Schedule(3, 3, 0), 5), (std::map<int64_t, int64_t>{{1, 0}, {2, 1}, {3, 2}, {4, 0}, {5, 1}}));
}

TEST(Schedule, AFragmentIsTakenByItsDelayEarlier) {
  const Schedule schedule(12, 2, 5);
  for (int64_t step = 0; step < 40; ++step) {
    EXPECT_EQ(schedule.takenAfter(step), schedule.synchronisedAfter(step + 5)) << step;
  }
  EXPECT_EQ(schedule.takenAfter(1), 0);
  EXPECT_EQ(schedule.takenAfter(7), 1);
}

std::string complaintOf(int64_t every, int64_t fragments, int64_t delay) {
  try {
    Schedule(every, fragments, delay);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

TEST(Schedule, RefusesWhatIsNoSchedule) {
  EXPECT_THAT(complaintOf(0, 1, 0), HasSubstr("sync_every must be at least 1, got 0"));
  EXPECT_THAT(complaintOf(4, 0, 0), HasSubstr("fragments must be at least 1, got 0"));
  EXPECT_THAT(complaintOf(4, 3, 0), HasSubstr("must be a multiple of fragments, got sync_every=4 and fragments=3"));
  EXPECT_THAT(complaintOf(4, 2, -1), HasSubstr("delay must not be negative, got -1"));
  EXPECT_THAT(complaintOf(4, 2, 2), HasSubstr("delay must be less than sync_every / fragments = 2 steps"));
  EXPECT_EQ(complaintOf(4, 2, 1), "none");
}

}  // namespace
}  // namespace bagua::rounds
