// SPDX-License-Identifier: Apache-2.0
// What the emulation of CUDA finds wrong, and what it lets pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/cuda_on_cpu/grid.h"
#include "tests/support/cuda_on_cpu/wrong_kernels.h"

namespace cuda_on_cpu {
namespace {

constexpr auto kGarbageNumber = static_cast<int32_t>(0xA5A5A5A5U);

std::vector<int32_t> resultsOf(Kernel kernel, unsigned blocks = 1) {
  std::vector<int32_t> results(size_t{blocks} * kThreads, -1);
  run(kernel, blocks, results.data());
  return results;
}

std::string errorOf(Kernel kernel) {
  try {
    resultsOf(kernel, 3);
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "none";
}

TEST(CudaOnCpu, ThreadsShuffleReduceAndMeet) {
  const std::vector<int32_t> results = resultsOf(Kernel::kSums, 5);
  constexpr int32_t kAll = kThreads * (kThreads - 1) / 2;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto first = static_cast<int32_t>(i % kThreads / kWarp * kWarp);
    ASSERT_EQ(results[i], kAll - (32 * first + 31 * 16)) << i;
  }
}

TEST(CudaOnCpu, ABarrierThatAThreadDoesNotReachIsAnError) {
  EXPECT_THAT(errorOf(Kernel::kBarrierOfSome), ::testing::AllOf(::testing::HasSubstr("wrong_kernels.cu:"),
                                                                ::testing::HasSubstr("thread 7 has left the kernel")));
}

TEST(CudaOnCpu, TwoBarriersThatHalfOfTheThreadsReachAreAnError) {
  EXPECT_THAT(errorOf(Kernel::kBarrierOfEachHalf), ::testing::HasSubstr("barrierOfEachHalf"));
}

TEST(CudaOnCpu, AShuffleOfHalfAWarpIsAnError) {
  EXPECT_THAT(errorOf(Kernel::kShuffleOfSome), ::testing::HasSubstr("has left the kernel"));
}

TEST(CudaOnCpu, TheStorageOfAReductionMayNotBeUsedTwiceWithoutABarrier) {
  EXPECT_THAT(errorOf(Kernel::kStorageUsedTwice), ::testing::HasSubstr("used again without a barrier"));
}

TEST(CudaOnCpu, GridsRunAfterOneThatFailed) {
  EXPECT_NE(errorOf(Kernel::kBarrierOfSome), "none");
  EXPECT_EQ(errorOf(Kernel::kSums), "none");
}

TEST(CudaOnCpu, OnlyThreadZeroGetsTheResultOfAReduction) {
  std::vector<int32_t> expected(kThreads, kGarbageNumber);
  expected[0] = kThreads;
  EXPECT_EQ(resultsOf(Kernel::kResultOfReductionInAllThreads), expected);
}

TEST(CudaOnCpu, SharedMemoryIsGarbageAtTheBeginOfEachBlock) {
  EXPECT_THAT(resultsOf(Kernel::kSharedMemoryThatNobodyWrote, 3), ::testing::Each(kGarbageNumber));
}

TEST(CudaOnCpu, SomeThreadReadsBeforeAnotherHasWrittenWithoutABarrier) {
  EXPECT_THAT(resultsOf(Kernel::kSharedMemoryReadWithoutBarrier, 20), ::testing::Contains(kGarbageNumber));
}

TEST(CudaOnCpu, TheOrderOfThreadsIsDrawnFromTheSeed) {
  const auto orderOf = [](uint64_t seed) {
    device().seed = seed;
    return resultsOf(Kernel::kOrder, 2);
  };
  std::vector<int32_t> order = orderOf(1);
  EXPECT_EQ(order, orderOf(1));
  EXPECT_NE(order, orderOf(2));
  EXPECT_FALSE(std::equal(order.begin(), order.begin() + kThreads, order.begin() + kThreads));
  std::vector<int32_t> numbers(kThreads);
  std::iota(numbers.begin(), numbers.end(), 0);
  EXPECT_TRUE(std::is_permutation(order.begin(), order.begin() + kThreads, numbers.begin()));
}

TEST(CudaOnCpu, LaunchesAreCounted) {
  const int64_t before = device().launches;
  resultsOf(Kernel::kSums, 4);
  EXPECT_EQ(device().launches, before + 1);
}

}  // namespace
}  // namespace cuda_on_cpu
