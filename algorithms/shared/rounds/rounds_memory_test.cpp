// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "algorithms/shared/rounds/rounds.h"
#include "kernels/device_ways.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/lone_communicator.h"

namespace bagua::rounds {
namespace {

// What ATen allocates on a thread.
class Allocations final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*data*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    bytes_ += bytes;
    most_ = std::max(most_, bytes_);
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
  [[nodiscard]] int64_t most() const { return most_; }

 private:
  int64_t bytes_ = 0;
  int64_t most_ = 0;
};

TEST(RoundsMemory, OnADeviceTheStartTakesLittleMoreThanWhatIsKept) {
  const AsOnDevice asOnDevice;
  const at::NoGradGuard noGrad;
  const std::vector<at::Tensor> weights = {at::ones({int64_t{16} << 20})};
  LoneCommunicator communicator;
  testing::ImmediateSteps context(communicator, weights);
  Rounds rounds(
      {.schedule = {.every = 10, .fragments = 1, .delay = 0}, .outer = OuterOptions{.rate = 0.7, .momentum = 0.9}});
  rounds.useModel(context);
  const auto allocations = std::make_shared<Allocations>();
  {
    const c10::DebugInfoGuard watched(c10::DebugInfoKind::PROFILER_STATE, allocations);
    rounds.beforeForward(context);
  }
  // The outer weights and their momentum.
  const auto kept = 2 * static_cast<double>(weights[0].nbytes());
  EXPECT_EQ(rounds.stateBytes(), static_cast<int64_t>(kept));
  EXPECT_LT(static_cast<double>(allocations->most()), 1.1 * kept);
}

}  // namespace
}  // namespace bagua::rounds
