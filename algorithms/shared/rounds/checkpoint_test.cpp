// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "algorithms/shared/rounds/rounds.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua::rounds {
namespace {

Settings settings() {
  return {.schedule = {.every = 4, .fragments = 2, .delay = 0},
          .outer = OuterOptions{.rate = 0.7, .momentum = 0.9, .nesterov = true}};
}

void takeSteps(Rounds& rounds, StepContext& context, const std::vector<at::Tensor>& weights, int steps) {
  for (int step = 0; step < steps; ++step) {
    rounds.beforeForward(context);
    for (const auto& weight : weights) weight.add_(0.1 * (context.rank() + 1));
    rounds.afterBackward(context);
    rounds.afterStep(context);
  }
}

// What has been synchronised before the checkpoint is not synchronised again after it: that would be an outer step of
// momentum alone.
TEST(RoundsCheckpoint, RightAfterASynchronisationAnEndChangesOnlyWhatHasTakenSteps) {
  for (const int steps : {2, 3, 4, 5}) {
    testing::runRanks(2, [&](Communicator& communicator) {
      const at::NoGradGuard noGrad;
      const std::vector<at::Tensor> weights = {at::full({5}, 1.0), at::full({7}, 2.0)};
      testing::ImmediateSteps context(communicator, weights);
      Rounds rounds(settings());
      rounds.useModel(context);
      takeSteps(rounds, context, weights, steps);

      const std::vector<at::Tensor> copies = {weights[0].clone(), weights[1].clone()};
      testing::ImmediateSteps copiedContext(communicator, copies);
      Rounds continued(settings());
      continued.useModel(copiedContext);
      continued.load(rounds.state(), copiedContext);

      rounds.synchronize(context);
      continued.synchronize(copiedContext);
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_TRUE(at::equal(weights[i], copies[i])) << "after " << steps << " steps: " << weights[i] << copies[i];
      }
    });
  }
}

}  // namespace
}  // namespace bagua::rounds
