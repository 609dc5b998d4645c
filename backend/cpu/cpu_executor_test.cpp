// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_executor.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "tests/support/lone_communicator.h"

namespace bagua {
namespace {

using ::testing::HasSubstr;

Operation operation() {
  return {.type = c10d::OpType::ALLREDUCE, .name = "bagua:test", .timeout = std::chrono::seconds(60)};
}

Operation overlapping() {
  Operation overlapping = operation();
  overlapping.mayOverlap = true;
  return overlapping;
}

std::string messageOf(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    work->wait(kNoTimeout);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

class CpuExecutorTest : public ::testing::Test {
 protected:
  CpuExecutor executor_{GroupIdentity{"pg", 0, 1}, loneChannels(1), nullptr};
};

TEST_F(CpuExecutorTest, ProgramsRunInTheOrderOfSubmission) {
  std::vector<int> order;
  c10::intrusive_ptr<c10d::Work> last;
  for (int i = 0; i < 1000; ++i)
    last = executor_.submit(operation(), {}, [&, i](Communicator&) { order.push_back(i); });
  last->wait(kNoTimeout);
  ASSERT_EQ(order.size(), 1000U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(last->getSequencenumber(), 999U);
}

TEST_F(CpuExecutorTest, TheFutureHoldsTheResults) {
  const at::Tensor tensor = at::full({2}, 1.0F);
  const auto work = executor_.submit(operation(), {tensor}, [tensor](Communicator&) mutable { tensor.add_(1); });
  work->wait(kNoTimeout);
  const auto values = work->getFuture()->value().toTensorVector();
  ASSERT_EQ(values.size(), 1U);
  EXPECT_TRUE(values[0].is_same(tensor));
  EXPECT_EQ(values[0][0].item<float>(), 2.0F);
}

TEST_F(CpuExecutorTest, AFailureNamesTheOperationAndEndsTheGroup) {
  const auto work = executor_.submit(operation(), {}, [](Communicator&) { TORCH_CHECK(false, "the cable is out"); });
  const std::string message = messageOf(work);
  EXPECT_THAT(message, HasSubstr("bagua:test #0"));
  EXPECT_THAT(message, HasSubstr("rank 0 of 1, group 'pg'"));
  EXPECT_THAT(message, HasSubstr("the cable is out"));
  EXPECT_FALSE(work->isSuccess());
  EXPECT_TRUE(work->getFuture()->hasError());
  EXPECT_THROW(executor_.submit(operation(), {}, [](Communicator&) {}), c10::DistBackendError);
  EXPECT_NE(executor_.error(), nullptr);
}

TEST_F(CpuExecutorTest, QueuedProgramsFailWithTheOneBeforeThem) {
  std::promise<void> open;
  auto gate = open.get_future().share();
  const auto first = executor_.submit(operation(), {}, [gate](Communicator&) {
    gate.wait();
    TORCH_CHECK(false, "broken pipe");
  });
  bool ran = false;
  const auto second = executor_.submit(operation(), {}, [&](Communicator&) { ran = true; });
  open.set_value();
  EXPECT_THAT(messageOf(second), HasSubstr("broken pipe"));
  EXPECT_FALSE(ran);
}

TEST_F(CpuExecutorTest, AbortFromAnotherThreadReleasesTheWaiter) {
  std::promise<void> open;
  auto gate = open.get_future().share();
  std::promise<void> running;
  const auto work = executor_.submit(operation(), {}, [&, gate](Communicator&) {
    running.set_value();
    gate.wait();
  });
  running.get_future().wait();
  std::thread aborter([&] { executor_.abort("somebody pulled the plug"); });
  EXPECT_THAT(messageOf(work), HasSubstr("somebody pulled the plug"));
  aborter.join();
  open.set_value();
}

TEST_F(CpuExecutorTest, AShorterWaitThrowsAndLeavesTheProgramRunning) {
  std::promise<void> open;
  auto gate = open.get_future().share();
  const auto work = executor_.submit(operation(), {}, [gate](Communicator&) { gate.wait(); });
  EXPECT_THROW(work->wait(std::chrono::milliseconds(1)), c10::DistBackendError);
  EXPECT_FALSE(work->isCompleted());
  open.set_value();
  EXPECT_TRUE(work->wait(kNoTimeout));
}

TEST_F(CpuExecutorTest, ShutdownLetsProgramsFinishAndRefusesNewOnes) {
  int ran = 0;
  for (int i = 0; i < 10; ++i) executor_.submit(operation(), {}, [&](Communicator&) { ++ran; });
  executor_.shutdown();
  executor_.shutdown();
  EXPECT_EQ(ran, 10);
  EXPECT_THROW(executor_.submit(operation(), {}, [](Communicator&) {}), c10::DistBackendError);
}

// A thread that is left behind may still run when the process ends, and what it uses is gone then.
TEST(CpuExecutor, WaitsForItsThreadToPutAProgramAway) {
  const auto wasDropped = std::make_shared<std::atomic<bool>>(false);
  {
    CpuExecutor executor{GroupIdentity{"pg", 0, 1}, loneChannels(1), nullptr};
    std::promise<void> running;
    const auto drop = [wasDropped](void*) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      *wasDropped = true;
    };
    executor.submit(operation(), {},
                    [&running, slow = std::shared_ptr<void>(nullptr, drop)](Communicator&) { running.set_value(); });
    running.get_future().wait();
  }
  EXPECT_TRUE(*wasDropped);
}

TEST_F(CpuExecutorTest, AGroupIsCompleteWhenAllOfItIs) {
  executor_.startGroup();
  const at::Tensor a = at::full({1}, 0.0F);
  const at::Tensor b = at::full({1}, 0.0F);
  executor_.submit(operation(), {a}, [a](Communicator&) mutable { a.fill_(1); });
  executor_.submit(operation(), {b}, [b](Communicator&) mutable { b.fill_(2); });
  const auto group = executor_.endGroup();
  group->wait(kNoTimeout);
  EXPECT_TRUE(group->isCompleted());
  EXPECT_EQ(a.item<float>() + b.item<float>(), 3.0F);
  EXPECT_EQ(group->getFuture()->value().toTensorVector().size(), 2U);
}

// It fails also where the first part has succeeded.
TEST_F(CpuExecutorTest, AGroupFailsWithThePartThatDoes) {
  executor_.startGroup();
  executor_.submit(operation(), {}, [](Communicator&) {});
  executor_.submit(operation(), {}, [](Communicator&) { TORCH_CHECK(false, "the cable is out"); });
  const auto group = executor_.endGroup();
  EXPECT_THAT(messageOf(group), HasSubstr("the cable is out"));
  EXPECT_FALSE(group->isSuccess());
  ASSERT_NE(group->exception(), nullptr);
  EXPECT_THAT(bagua::messageOf(group->exception()), HasSubstr("the cable is out"));
}

// A group is never ended where an operation in it was refused.
TEST_F(CpuExecutorTest, WhatBelongsToAGroupThatWasNeverEndedIsNoPartOfTheNext) {
  executor_.startGroup();
  executor_.submit(operation(), {at::full({1}, 0.0F)}, [](Communicator&) {});
  executor_.startGroup();
  const at::Tensor own = at::full({1}, 0.0F);
  executor_.submit(operation(), {own}, [](Communicator&) {});
  const auto group = executor_.endGroup();
  group->wait(kNoTimeout);
  const auto results = group->result();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_TRUE(results[0].is_same(own));
}

class TwoChannelsTest : public ::testing::Test {
 protected:
  CpuExecutor executor_{GroupIdentity{"pg", 0, 1}, loneChannels(2), nullptr};
};

TEST_F(TwoChannelsTest, ProgramsThatMayOverlapRunSideBySide) {
  std::promise<Communicator*> first;
  std::promise<Communicator*> second;
  const auto meet = [](std::promise<Communicator*>& own, std::promise<Communicator*>& other) {
    return [&own, met = other.get_future().share()](Communicator& communicator) {
      own.set_value(&communicator);
      EXPECT_NE(met.get(), &communicator);
    };
  };
  const auto one = executor_.submit(overlapping(), {}, meet(first, second));
  const auto other = executor_.submit(overlapping(), {}, meet(second, first));
  EXPECT_TRUE(one->wait(kNoTimeout));
  EXPECT_TRUE(other->wait(kNoTimeout));
}

// Ranks that come with different programs meet on one channel, where they find out.
TEST_F(TwoChannelsTest, TheSequenceNumberChoosesTheChannel) {
  std::vector<Communicator*> used(200);
  for (int i = 0; i < 200; ++i) {
    auto one = i % 3 == 0 ? operation() : overlapping();
    one.isAwaited = i % 6 == 0;
    executor_.submit(one, {}, [&used, i](Communicator& communicator) { used[i] = &communicator; });
  }
  executor_.submit(operation(), {}, [](Communicator&) {})->wait(kNoTimeout);
  EXPECT_NE(used[0], used[1]);
  for (int i = 2; i < 200; ++i) EXPECT_EQ(used[i], used[i - 2]) << i;
}

TEST_F(TwoChannelsTest, AnyOtherProgramHasTheExecutorToItself) {
  std::atomic<int> running = 0;
  c10::intrusive_ptr<c10d::Work> last;
  for (int i = 0; i < 300; ++i) {
    const bool isAlone = i % 3 == 2;
    last = executor_.submit(isAlone ? operation() : overlapping(), {}, [&, isAlone](Communicator&) {
      const int others = running++;
      EXPECT_TRUE(!isAlone || others == 0);
      std::this_thread::yield();
      EXPECT_TRUE(!isAlone || running == 1);
      --running;
    });
  }
  last->wait(kNoTimeout);
}

TEST_F(TwoChannelsTest, AFailureEndsWhatRunsBesideIt) {
  std::promise<void> isRunning;
  const auto beside = executor_.submit(overlapping(), {}, [&](Communicator& communicator) {
    isRunning.set_value();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    const auto& isAborted = static_cast<LoneCommunicator&>(communicator).isAborted;
    while (!isAborted && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_TRUE(isAborted);
    TORCH_CHECK(false, "aborted");
  });
  isRunning.get_future().wait();
  const auto failing =
      executor_.submit(overlapping(), {}, [](Communicator&) { TORCH_CHECK(false, "the cable is out"); });
  EXPECT_THAT(messageOf(failing), HasSubstr("bagua:test #1"));
  EXPECT_THAT(messageOf(beside), HasSubstr("the cable is out"));
}

}  // namespace
}  // namespace bagua
