// SPDX-License-Identifier: Apache-2.0
// Options reach the rounds.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

// Returns the state before the first step of a model that has three parameters in two fragments.
AlgorithmState firstState(std::map<std::string, OptionValue> options, Communicator& communicator) {
  const at::NoGradGuard noGrad;
  const std::vector<at::Tensor> weights = {at::ones({5}), at::ones({7}), at::ones({9})};
  testing::ImmediateSteps context(communicator, weights);
  options.insert({{"sync_every", int64_t{4}}, {"fragments", int64_t{2}}, {"delay", int64_t{0}}});
  const auto& info = AlgorithmRegistry::find("diloco");
  const auto algorithm = info.create(Options(info.name, info.options, options));
  auto& onWeights = *algorithm->as<ActsOnWeights>();
  onWeights.useModel(context);
  onWeights.beforeForward(context);
  return algorithm->as<KeepsState>()->state();
}

TEST(DiLoCo, CutsFragmentsInThePatternThatIsAskedFor) {
  testing::runRanks(2, [](Communicator& communicator) {
    for (const auto& [pattern, elements] : std::map<std::string, int64_t>{{"consecutive", 12}, {"strided", 14}}) {
      const auto state = firstState({{"fragment_pattern", pattern}}, communicator);
      EXPECT_EQ(state.at("outer_weights.0").numel(), elements) << pattern;
    }
  });
}

TEST(DiLoCo, KeepsWhatCodingLeavesOfDifferencesUnlessErrorFeedbackIsOff) {
  testing::runRanks(2, [](Communicator& communicator) {
    for (const bool hasFeedback : {false, true}) {
      const auto state = firstState({{"codec", std::string("4bit")}, {"error_feedback", hasFeedback}}, communicator);
      EXPECT_EQ(state.contains("residual.0"), hasFeedback);
    }
  });
}

}  // namespace
}  // namespace bagua
