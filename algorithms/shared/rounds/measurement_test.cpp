// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/measurement.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <utility>

#include "tests/support/immediate_steps.h"
#include "tests/support/lone_communicator.h"

namespace bagua::rounds {
namespace {

using namespace std::chrono_literals;
using Clock = Measurement::Clock;
using End = std::shared_ptr<Measurement::End>;

// Over at a moment.
class Timed final : public c10d::Work {
 public:
  explicit Timed(Clock::time_point end) : end_(end) {}
  bool isCompleted() override { return Clock::now() >= end_; }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    std::this_thread::sleep_until(end_);
    return true;
  }

 private:
  const Clock::time_point end_;
};

class Failed final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { throw std::runtime_error("a peer has gone"); }
};

class MeasurementTest : public ::testing::Test {
 protected:
  // What was found of an exchange of this length, by steps of 10 ms. The tenth is as long as `tenth`.
  Measured measured(Clock::duration exchange, Clock::duration tenth = 10ms, bool isEndKnown = true) {
    Measurement measurement;
    for (int step = 1; step <= 64; ++step) {
      std::this_thread::sleep_for(step == 10 ? tenth : 10ms);
      const auto found = measurement.afterStep(context_, [&](const End& end) -> c10::intrusive_ptr<c10d::Work> {
        ++begun_;
        if (isEndKnown) *end = Clock::now() + exchange;
        return c10::make_intrusive<Timed>(Clock::now() + exchange);
      });
      if (!found) continue;
      steps_ = step;
      return *found;
    }
    return {};
  }

  const at::NoGradGuard noGrad_;
  const std::vector<at::Tensor> weights_ = {at::ones({4})};
  LoneCommunicator communicator_;
  testing::ImmediateSteps context_{communicator_, weights_};
  int begun_ = 0;
  int steps_ = 0;
};

TEST_F(MeasurementTest, AnExchangeLastsAsManyStepsAsEndBeforeItIsOver) {
  const auto found = measured(25ms);
  // Ranks compare what they have found after 16 steps, and none of them waits for that before the next one.
  EXPECT_EQ(steps_, 17);
  EXPECT_EQ(begun_, 1);
  EXPECT_GE(found.stepSeconds, 0.01);
  EXPECT_GE(found.stepsOfExchange, 1);
  EXPECT_LE(found.stepsOfExchange, 3);
  EXPECT_EQ(measured(0ms).stepsOfExchange, 1);
}

TEST_F(MeasurementTest, AStepThatHasWaitedCountsAsThoseThatTheExchangeLasted) {
  const auto found = measured(150ms, 600ms);
  EXPECT_NEAR(found.stepsOfExchange * found.stepSeconds, 0.15, 0.05);
  const auto whole = measured(150ms, 600ms, false);
  EXPECT_NEAR(whole.stepsOfExchange * whole.stepSeconds, 0.6, 0.2);
  // It was over before.
  EXPECT_EQ(measured(0ms, 600ms).stepsOfExchange, 1);
}

TEST_F(MeasurementTest, ALongOneIsWaitedFor) {
  const auto found = measured(400ms);
  EXPECT_EQ(steps_, 17);
  // By steps that took longer than they slept.
  EXPECT_GE(found.stepsOfExchange, 8);
  EXPECT_NEAR(found.stepsOfExchange * found.stepSeconds, 0.4, 0.2);
}

TEST_F(MeasurementTest, RanksWithOtherPartsOfTheWeightsGoByTheSameNumbers) {
  context_.shards = [&](const char* name, const std::vector<at::Tensor>& tensors, StepContext::Task task) {
    // One of them has seen the exchange end earlier, after longer steps: what is asked for is the least.
    EXPECT_EQ(tensors.front().numel(), 2);
    tensors.front().copy_(at::minimum(tensors.front(), at::tensor({0.5, -2.0}, at::kDouble)));
    return context_.submit(name, tensors, StepContext::Wait::kLater, std::move(task));
  };
  const auto found = measured(25ms);
  EXPECT_EQ(steps_, 18);
  EXPECT_EQ(found.stepsOfExchange, 0.5);
  EXPECT_EQ(found.stepSeconds, 2);
}

TEST_F(MeasurementTest, AnErrorOfTheExchangeComesOutInTheStepThatFindsItOver) {
  Measurement measurement;
  const auto step = [&] {
    measurement.afterStep(context_,
                          [](const End&) -> c10::intrusive_ptr<c10d::Work> { return c10::make_intrusive<Failed>(); });
  };
  for (int i = 0; i < 8; ++i) step();
  EXPECT_THROW(step(), std::runtime_error);
}

}  // namespace
}  // namespace bagua::rounds
