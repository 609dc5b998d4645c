// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

// A round moves the weights by a difference to those that it began with, which the loaded state has replaced.
TEST(AsyncModelAverage, ARoundThatBeganBeforeAStateWasLoadedDoesNotMoveTheWeights) {
  const auto& info = AlgorithmRegistry::find("async");
  for (const bool isLoaded : {false, true}) {
    testing::runRanks(2, [&](Communicator& communicator) {
      const at::NoGradGuard noGrad;
      const std::vector<at::Tensor> weights = {at::full({5}, static_cast<float>(communicator.rank()))};
      testing::ImmediateSteps context(communicator, weights);
      // No second round begins in so short a time.
      const auto algorithm = info.create(Options(info.name, info.options, {{"sync_interval_ms", int64_t{600'000}}}));
      auto& onWeights = *algorithm->as<ActsOnWeights>();
      auto& keeps = *algorithm->as<KeepsState>();
      onWeights.useModel(context);
      onWeights.beforeForward(context);
      if (isLoaded) {
        weights[0].fill_(7);
        keeps.load(keeps.state(), context);
      }
      onWeights.beforeForward(context);
      EXPECT_TRUE(weights[0].eq(isLoaded ? 7 : 0.5).all().item<bool>()) << isLoaded << " " << weights[0];
    });
  }
}

TEST(AsyncModelAverage, SynchronizeGoesOnWithRoundsUnlessTheyWerePausedBefore) {
  const auto& info = AlgorithmRegistry::find("async");
  testing::runRanks(2, [&](Communicator& communicator) {
    const at::NoGradGuard noGrad;
    const std::vector<at::Tensor> weights = {at::full({5}, static_cast<float>(communicator.rank()))};
    testing::ImmediateSteps context(communicator, weights);
    const auto algorithm = info.create(Options(info.name, info.options, {}));
    auto& onWeights = *algorithm->as<ActsOnWeights>();
    auto& inBackground = *algorithm->as<RunsInBackground>();
    onWeights.useModel(context);
    onWeights.synchronize(context);
    EXPECT_FALSE(inBackground.resume(context)) << "there was nothing to resume";
    inBackground.abort(context);
    onWeights.synchronize(context);
    EXPECT_TRUE(inBackground.resume(context)) << "the user had paused them";
  });
}

}  // namespace
}  // namespace bagua
