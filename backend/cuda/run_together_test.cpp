// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/run_together.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <stdexcept>
#include <thread>

namespace bagua {
namespace {

TEST(RunTogether, CallsThatWaitForEachOtherReturn) {
  std::barrier<> all(3);
  const std::function<void()> wait = [&all] { all.arrive_and_wait(); };
  runTogether([] {}, {wait, wait, wait});
}

TEST(RunTogether, AFailureStopsNoneOfTheOthersAndIsThrown) {
  std::atomic<int> ran = 0;
  const auto succeed = [&ran] { ++ran; };
  const auto fail = [] { throw std::runtime_error("no"); };
  EXPECT_THROW(runTogether([] {}, {succeed, fail, succeed}), std::runtime_error);
  EXPECT_THROW(runTogether([] {}, {fail, succeed}), std::runtime_error);
  EXPECT_EQ(ran, 3);
}

TEST(RunTogether, EveryCallHasAThreadThatIsPreparedFirst) {
  const auto caller = std::this_thread::get_id();
  static thread_local bool isPrepared = false;
  std::atomic<int> ran = 0;
  const auto call = [&ran, caller] {
    EXPECT_NE(std::this_thread::get_id(), caller);
    EXPECT_TRUE(isPrepared);
    ++ran;
  };
  runTogether([] { isPrepared = true; }, {call, call, call});
  EXPECT_EQ(ran, 3);
  EXPECT_FALSE(isPrepared) << "the caller's thread stays as it is";
}

TEST(RunTogether, AThreadThatCannotBePreparedMakesItsCallAllTheSame) {
  bool isMade = false;
  runTogether([] { throw std::runtime_error("no device"); }, {[&] { isMade = true; }});
  EXPECT_TRUE(isMade);
}

TEST(RunTogether, NothingToRun) {
  runTogether([] {}, {});
}

}  // namespace
}  // namespace bagua
