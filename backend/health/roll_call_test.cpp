// SPDX-License-Identifier: Apache-2.0
#include "backend/health/roll_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "backend/health/group_health.h"

namespace bagua {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

std::vector<Activity> idle() { return {Activity{.executor = "cpu", .completed = {}, .current = {}}}; }

// A rank may have been stopped since it has answered.
TEST(RollCall, KnowsNothingOfTheAnswersToAnEarlierOne) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  FailureBoard first(*store, 0);
  FailureBoard second(*store, 1);
  RollCall asking(0, 2, idle);
  RollCall answering(1, 2, idle);
  const auto never = Clock::time_point::max();
  asking.call(&first, Clock::now() - std::chrono::hours(1), never);
  EXPECT_EQ(asking.number(), 1);
  asking.answer(first);
  answering.answer(second);
  asking.collect(first);
  EXPECT_EQ(asking.answers().size(), 1);
  EXPECT_THAT(asking.silent(), IsEmpty());
  asking.call(&first, Clock::now() + std::chrono::hours(1), never);
  EXPECT_EQ(asking.number(), 2);
  asking.collect(first);
  EXPECT_THAT(asking.answers(), IsEmpty());
  EXPECT_THAT(asking.silent(), ElementsAre(1));
}

// The other end is the only other rank that is here: the third may have left.
TEST(RollCall, OfAMessageOnlyItsOtherEndIsNamed) {
  ::setenv("TORCH_FR_DUMP_ON_TIMEOUT", "0", 1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  GroupHealth receiver({.name = "group", .rank = 0, .size = 3}, store);
  GroupHealth sender({.name = "group", .rank = 1, .size = 3}, store);
  const auto aborted = std::make_shared<std::promise<std::string>>();
  const auto log = receiver.addLog("cpu");
  log->onFailure([aborted](const std::string& cause) { aborted->set_value(cause); });
  const auto busy = sender.addLog("cpu");
  busy->end(busy->begin({.name = "bagua:barrier", .timeout = std::chrono::minutes(5)}), true);
  log->begin({.name = "bagua:recv", .peer = 1, .timeout = std::chrono::milliseconds(500)},
             OperationLog::Kind::kMessage);
  auto cause = aborted->get_future();
  ASSERT_EQ(cause.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_THAT(cause.get(),
              AllOf(HasSubstr("timed out after 500 ms"), HasSubstr("Not there: rank 1 ("), Not(HasSubstr("rank 2"))));
}

}  // namespace
}  // namespace bagua
