// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/guard/guard.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "backend/stage_clock.h"
#include "kernels/device_ways.h"

namespace bagua {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kParameter = 1;
constexpr double kLimit = 0.1;

Bucket bucketAt(int64_t step) {
  const at::Tensor flat = at::zeros({4});
  return {.flat = flat, .entries = {{0, flat.narrow(0, 0, 2)}, {kParameter, flat.narrow(0, 2, 2)}}, .step = step};
}

// A step in which the guard reads `value`.
std::vector<int64_t> step(Guard& guard, const Bucket& bucket, double value, int rank = 1) {
  auto changed = guard.begin(bucket, rank);
  guard.note(bucket.step, at::tensor({value}), [](const float* numbers) {
    return std::vector<Guard::Reading>{{kParameter, Guard::Measure::kCoding, numbers[0], kLimit, "4bit", "int8"}};
  });
  return changed;
}

std::vector<int64_t> step(Guard& guard, int64_t number, double value, int rank = 1) {
  return step(guard, bucketAt(number), value, rank);
}

TEST(Guard, GivesAVerdictWhenTwoLooksInARowFindTheSameAndInTheNextStep) {
  Guard guard(Guard::Mode::kAdapt);
  EXPECT_THAT(step(guard, 0, 0.2), IsEmpty());
  EXPECT_THAT(step(guard, 1, 0.05), IsEmpty());
  EXPECT_THAT(step(guard, 2, 0.2), IsEmpty());
  EXPECT_THAT(step(guard, 3, 0.2), IsEmpty());
  EXPECT_EQ(guard.levelOf(kParameter), 0);
  EXPECT_THAT(step(guard, 4, 0.05), ElementsAre(kParameter));
  EXPECT_EQ(guard.levelOf(kParameter), 1);
  EXPECT_EQ(guard.levelOf(0), 0);
  EXPECT_THAT(step(guard, 5, 0.05), IsEmpty()) << "it is told once";
  EXPECT_EQ(guard.report().alarms, 1);
  EXPECT_EQ(guard.report().looks, 6);
}

TEST(Guard, RaisesStepByStepAndComesDownByRule) {
  Guard guard(Guard::Mode::kAdapt);
  for (int64_t number = 0; number < 4; ++number) step(guard, number, 1);
  EXPECT_THAT(step(guard, 4, 0.01), ElementsAre(kParameter));
  EXPECT_EQ(guard.levelOf(kParameter), 2);
  EXPECT_THAT(step(guard, 1003, 0.01), IsEmpty());
  EXPECT_THAT(step(guard, 1004, 0.01), ElementsAre(kParameter));
  EXPECT_EQ(guard.levelOf(kParameter), 1);
  // It returns, and stays twice as long.
  step(guard, 1005, 1);
  step(guard, 1006, 1);
  EXPECT_THAT(step(guard, 1007, 0.01), ElementsAre(kParameter));
  EXPECT_THAT(step(guard, 3006, 0.01), IsEmpty());
  EXPECT_THAT(step(guard, 3007, 0.01), ElementsAre(kParameter));
}

TEST(Guard, OnlyWarnsIfThatIsAskedForOnceAndCountsEachExcursion) {
  Guard guard(Guard::Mode::kWarn);
  guard.useNames({"a.weight", "b.weight"});
  ::testing::internal::CaptureStderr();
  for (int64_t number = 0; number < 9; ++number) EXPECT_THAT(step(guard, number, 0.3, 0), IsEmpty());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("'b.weight' at step 1: coding with 4bit loses 0.3"), HasSubstr("up to 0.1 is sound")));
  EXPECT_EQ(guard.levelOf(kParameter), 0);
  EXPECT_EQ(guard.report().alarms, 1);
  EXPECT_NEAR(guard.report().worst[0], 0.3, 1e-6);
  ::testing::internal::CaptureStderr();
  // An excursion is over at half the limit.
  step(guard, 9, 0.08, 0);
  for (int64_t number = 10; number < 13; ++number) step(guard, number, 0.3, 0);
  EXPECT_EQ(guard.report().alarms, 1);
  step(guard, 13, 0.01, 0);
  for (int64_t number = 14; number < 17; ++number) step(guard, number, 0.3, 0);
  EXPECT_EQ(guard.report().alarms, 2);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Guard, SaysNothingOnOtherRanksAndOfWhatIsNotFinite) {
  Guard guard(Guard::Mode::kWarn);
  ::testing::internal::CaptureStderr();
  for (int64_t number = 0; number < 4; ++number) step(guard, number, std::numeric_limits<double>::quiet_NaN(), 0);
  EXPECT_EQ(guard.report().alarms, 0);
  for (int64_t number = 4; number < 8; ++number) step(guard, number, 1, 1);
  EXPECT_EQ(guard.report().alarms, 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

// They may be the only ones with outliers.
TEST(Guard, SaysOnceForAllWhereOthersHoldTheFirstShards) {
  Guard guard(Guard::Mode::kAdapt);
  const auto saidAt = [&](int64_t number) {
    Bucket bucket = bucketAt(number);
    bucket.isOfFirstShards = false;
    ::testing::internal::CaptureStderr();
    step(guard, bucket, 1, 0);
    return ::testing::internal::GetCapturedStderr();
  };
  for (const int64_t number : {0, 1}) EXPECT_EQ(saidAt(number), "") << number;
  EXPECT_THAT(saidAt(2), HasSubstr("'parameter 1', in another shard than the first, at step 1: coding"));
  for (const int64_t number : {3, 4}) EXPECT_EQ(saidAt(number), "") << number;
  EXPECT_EQ(guard.report().alarms, 2);
}

TEST(Guard, OfDifferencesItOnlyWarns) {
  const auto modeWith = [](const std::string& word) {
    return Guard::modeOf(Options("test", {Guard::option(Guard::Messages::kDifferences)}, {{"guard", word}}),
                         Guard::Messages::kDifferences);
  };
  EXPECT_EQ(modeWith("warn"), Guard::Mode::kWarn);
  EXPECT_EQ(modeWith(""), Guard::Mode::kOff);
  EXPECT_THROW(modeWith("adapt"), c10::ValueError);
  EXPECT_THROW(modeWith("adopt"), c10::ValueError);
  Guard guard(Guard::Mode::kWarn, Guard::Messages::kDifferences);
  ::testing::internal::CaptureStderr();
  for (int64_t number = 0; number < 3; ++number) step(guard, number, 0.3, 0);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), AllOf(HasSubstr("loses 0.3 of its difference's squared norm"),
                                                              HasSubstr("Coded with int8 it would lose less")));
}

TEST(Guard, AContinuedRunComesToTheSameVerdicts) {
  for (int64_t half = 1; half < 8; ++half) {
    Guard whole(Guard::Mode::kAdapt);
    std::optional<Guard> continued(std::in_place, Guard::Mode::kAdapt);
    for (int64_t number = 0; number < 8; ++number) {
      if (number == half) {
        const at::Tensor saved = continued->state();
        continued.emplace(Guard::Mode::kAdapt);
        continued->load(saved);
      }
      EXPECT_EQ(step(whole, number, 1), step(*continued, number, 1)) << half << " " << number;
      EXPECT_EQ(whole.levelOf(kParameter), continued->levelOf(kParameter)) << half << " " << number;
    }
  }
  EXPECT_FALSE(Guard(Guard::Mode::kAdapt).state().defined());
}

TEST(Guard, RefusesATableThatItHasNotMadeOrOfAnotherModel) {
  Guard guard(Guard::Mode::kAdapt);
  for (int64_t number = 0; number < 3; ++number) step(guard, number, 1);
  const at::Tensor table = guard.state();
  Guard::check(table, kParameter + 1);
  EXPECT_THROW(Guard::check(table, kParameter), c10::ValueError);
  EXPECT_THROW(Guard::check(at::zeros({3, 2}), 0), c10::ValueError);
}

TEST(Guard, ABucketThatAGraphCapturesSettlesNothing) {
  Guard guard(Guard::Mode::kWarn);
  for (int64_t number = 0; number < 2; ++number) step(guard, number, 1);
  Bucket bucket = bucketAt(2);
  bucket.isCaptured = true;
  guard.begin(bucket, 1);
  EXPECT_EQ(guard.report().alarms, 0);
  guard.begin(bucketAt(3), 1);
  EXPECT_EQ(guard.report().alarms, 1);
}

TEST(Guard, LooksAtTwoStepsInARowOfEachWindowAtTheSamePlacesButAtNoneThatAGraphCaptures) {
  const Guard guard(Guard::Mode::kWarn);
  Bucket bucket = bucketAt(0);
  std::map<uint64_t, std::vector<int64_t>> looks;
  for (int64_t number = 128; number < 51 * 128; ++number) {
    bucket.step = number;
    if (const auto key = guard.keyOfLook(bucket, 0)) looks[*key].push_back(number);
  }
  std::set<int64_t> places;
  EXPECT_EQ(looks.size(), 50);
  for (const auto& [key, steps] : looks) {
    EXPECT_THAT(steps, ElementsAre(steps[0], steps[0] + 1));
    EXPECT_EQ(steps.front() / 128, steps.back() / 128);
    places.insert(steps[0] % 128);
  }
  EXPECT_GT(places.size(), 25) << "nobody knows when";
  bucket.step = 100;
  EXPECT_TRUE(guard.keyOfLook(bucket, 100)) << "the first that is coded";
  bucket.isCaptured = true;
  EXPECT_FALSE(guard.keyOfLook(bucket, 100));
  EXPECT_FALSE(Guard(Guard::Mode::kOff).keyOfLook(bucketAt(0), 0));
}

TEST(Guard, DrawsOtherStepsForOtherBucketsAndAllPlacesOfAShortWindow) {
  const Guard guard(Guard::Mode::kWarn);
  const auto beginOfLooks = [&](int64_t parameter, int64_t window, int64_t number) {
    Bucket bucket = bucketAt(number * window);
    bucket.firstParameter = parameter;
    while (!guard.keyOfLook(bucket, 0, window)) ++bucket.step;
    return bucket.step - number * window;
  };
  std::set<int64_t> ofBuckets;
  for (int64_t parameter = 0; parameter < 10; ++parameter) ofBuckets.insert(beginOfLooks(parameter, 128, 7));
  EXPECT_GT(ofBuckets.size(), 5);
  std::set<int64_t> ofWindows;
  for (int64_t number = 1; number < 30; ++number) ofWindows.insert(beginOfLooks(0, 4, number));
  EXPECT_THAT(ofWindows, ElementsAre(0, 1, 2));
}

TEST(Guard, TheFirstStepsHaveTheSamePlacesAlsoWhereAWindowEndsBetweenThem) {
  const Guard guard(Guard::Mode::kWarn);
  const auto first = guard.keyOfLook(bucketAt(127), 127);
  EXPECT_TRUE(first);
  EXPECT_EQ(guard.keyOfLook(bucketAt(128), 127), first);
}

TEST(Guard, WhatALookSaysOfTheCodecThatItHasReplacedIsForgotten) {
  Guard guard(Guard::Mode::kAdapt);
  const auto look = [&](int64_t number) {
    guard.begin(bucketAt(number), 1);
    guard.note(number, at::zeros({1}), [](const float*) {
      return std::vector<Guard::Reading>{{kParameter, Guard::Measure::kCoding, 1, kLimit, "4bit", "int8"},
                                         {kParameter, Guard::Measure::kMean, 1, kLimit, "4bit", "int8"}};
    });
  };
  for (int64_t number = 0; number < 3; ++number) look(number);
  EXPECT_EQ(guard.levelOf(kParameter), 1);
  guard.begin(bucketAt(3), 1);
  EXPECT_EQ(guard.levelOf(kParameter), 1) << "one look of the finer codec is not two";
}

// Without a clock nobody knows whether a device has come: who adapts waits, who warns does without the look.
TEST(Guard, WaitsForADeviceOnlyWhereRanksHaveToDoTheSame) {
  const AsOnDevice asOnDevice;
  for (const auto mode : {Guard::Mode::kWarn, Guard::Mode::kAdapt}) {
    Guard guard(mode);
    {
      const StageClock::Scope untimed(StageClock::none());
      for (int64_t number = 0; number < 3; ++number) step(guard, number, 1);
    }
    const int64_t before = mode == Guard::Mode::kAdapt ? 1 : 0;
    EXPECT_EQ(guard.report().alarms, before);
    for (int64_t number = 3; number < 6; ++number) step(guard, number, 1);
    EXPECT_EQ(guard.report().alarms, before + 1) << "later looks are read all the same";
  }
}

}  // namespace
}  // namespace bagua
