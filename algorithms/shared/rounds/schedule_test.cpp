// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/schedule.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>

namespace bagua::rounds {
namespace {

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

TEST(Schedule, RefusesWhatIsNoSchedule) {
  EXPECT_THROW(Schedule(0, 1, 0), c10::ValueError);
  EXPECT_THROW(Schedule(4, 0, 0), c10::ValueError);
  EXPECT_THROW(Schedule(4, 3, 0), c10::ValueError);
  EXPECT_THROW(Schedule(4, 2, -1), c10::ValueError);
  EXPECT_THROW(Schedule(4, 2, 2), c10::ValueError);
  EXPECT_NO_THROW(Schedule(4, 2, 1));
}

}  // namespace
}  // namespace bagua::rounds
