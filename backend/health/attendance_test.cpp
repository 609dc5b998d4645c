// SPDX-License-Identifier: Apache-2.0
#include "backend/health/attendance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

ProgramFingerprint fingerprintOfAllReduce(uint64_t sequence, int64_t numel = 5) {
  Operation operation{.name = "bagua:all_reduce", .dtype = at::kFloat, .numel = numel};
  operation.sequence = sequence;
  operation.reduceOp = 0;
  return fingerprintOf(operation);
}

Activity within(const ProgramFingerprint& program) {
  return {.executor = "cpu", .completed = {}, .current = momentOf(program, Clock::now() - milliseconds(1500))};
}

Activity after(const ProgramFingerprint& program) {
  return {.executor = "cpu", .completed = momentOf(program, Clock::now() - milliseconds(2500)), .current = {}};
}

TEST(Activity, SurvivesTheWayThroughTheStore) {
  Activity both = after(fingerprintOfAllReduce(3));
  both.current = momentOf(fingerprintOfAllReduce(4), Clock::now());
  const auto read = decodeActivities(encode({both, within(fingerprintOfAllReduce(7)), after(fingerprintOfAllReduce(9)),
                                             Activity{.executor = "cuda", .completed = {}, .current = {}}}));
  ASSERT_EQ(read.size(), 4);
  EXPECT_EQ(read[0].describe(), both.describe());
  EXPECT_EQ(read[0].completed.text, "bagua:all_reduce #3 (Float[5], sum)");
  EXPECT_EQ(read[1].current.hash, fingerprintOfAllReduce(7).hash());
  EXPECT_FALSE(read[1].completed.exists);
  EXPECT_EQ(read[2].completed.sequence, 9);
  EXPECT_FALSE(read[2].current.exists);
  EXPECT_EQ(read[3].describe(), "has not begun any operation");
}

TEST(Activity, WhatDoesNotReadAsOneIsLeftOut) {
  EXPECT_TRUE(decodeActivities("").empty());
  EXPECT_TRUE(decodeActivities("cpu\t1\t2").empty());
  EXPECT_TRUE(decodeActivities("cpu\tx\t2\t3\ttext\t4\t5\t6\ttext\t\n").empty());
}

TEST(Attendance, TellsThoseWhoWaitFromThoseWhoAreMissing) {
  const auto operation = fingerprintOfAllReduce(4);
  const std::map<int, std::vector<Activity>> answers{{0, {within(operation)}},
                                                     {1, {after(fingerprintOfAllReduce(3))}},
                                                     {2, {within(fingerprintOfAllReduce(4, 6))}},
                                                     {3, {after(fingerprintOfAllReduce(4))}}};
  const auto found = attendanceOf(operation, false, "cpu", answers, {5});
  EXPECT_THAT(found.waiting, ElementsAre(0));
  const std::string text = found.describe();
  EXPECT_THAT(text,
              HasSubstr("rank 1 (has nothing under way, last completed bagua:all_reduce #3 (Float[5], sum) 2.5 s"));
  EXPECT_THAT(text, HasSubstr("rank 2 (has been in bagua:all_reduce #4 (Float[6], sum) for 1.5 s)"));
  EXPECT_THAT(text, Not(HasSubstr("rank 3")));
  EXPECT_THAT(text, HasSubstr("rank 5 (does not answer"));
  EXPECT_THAT(text, HasSubstr("Waiting as well: rank 0."));
}

TEST(Attendance, OfTheFirstOperationWhoeverHasCompletedNothingIsMissing) {
  const std::map<int, std::vector<Activity>> answers{{1, {within(fingerprintOfAllReduce(0, 6))}}};
  const auto found = attendanceOf(fingerprintOfAllReduce(0), false, "cpu", answers, {});
  EXPECT_THAT(found.describe(), HasSubstr("rank 1 (has been in bagua:all_reduce #0 (Float[6], sum)"));
}

TEST(Attendance, LooksAtEveryProgramThatARankHasUnderWay) {
  const auto operation = fingerprintOfAllReduce(5);
  const std::map<int, std::vector<Activity>> answers{
      {0, {within(fingerprintOfAllReduce(4)), within(operation)}},
      {1, {within(fingerprintOfAllReduce(3)), within(fingerprintOfAllReduce(4))}}};
  const auto found = attendanceOf(operation, false, "cpu", answers, {});
  EXPECT_THAT(found.waiting, ElementsAre(0));
  EXPECT_THAT(found.describe(), HasSubstr("rank 1 (has been in bagua:all_reduce #3"));
}

TEST(Fingerprint, ComparesWhatHasToAgreeAndNothingElse) {
  Operation uneven{.name = "bagua:gather", .dtype = at::kFloat, .numel = 5};
  uneven.commonNumel = Operation::kAnyNumel;
  Operation other = uneven;
  other.numel = 7;
  EXPECT_EQ(fingerprintOf(uneven).hash(), fingerprintOf(other).hash());
  EXPECT_NE(fingerprintOfAllReduce(4, 5).hash(), fingerprintOfAllReduce(4, 6).hash());
  other.configuration = std::make_shared<const std::string>("bytegrad(average=True)");
  EXPECT_NE(fingerprintOf(uneven).hash(), fingerprintOf(other).hash());
  EXPECT_THAT(describe(fingerprintOf(other)), HasSubstr("bytegrad(average=True)"));
}

TEST(Fingerprint, TellsTheNamesOfOperationsWhole) {
  const Operation longest{.name = "bagua:all_gather_into_tensor_coalesced", .sequence = 1};
  EXPECT_THAT(describe(fingerprintOf(longest)), HasSubstr("bagua:all_gather_into_tensor_coalesced #1"));
}

}  // namespace
}  // namespace bagua
