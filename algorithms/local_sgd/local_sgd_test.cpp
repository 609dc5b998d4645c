// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

TEST(LocalSgd, AveragesGradientsInsideHostsWhereThatIsAskedFor) {
  const auto& info = AlgorithmRegistry::find("local_sgd");
  testing::runRanks(
      3,
      [&](Communicator& communicator) {
        const std::vector<at::Tensor> weights = {at::ones({5})};
        testing::ImmediateSteps context(communicator, weights);
        for (const bool hierarchical : {false, true}) {
          const auto algorithm = info.create(Options(info.name, info.options, {{"hierarchical", hierarchical}}));
          auto& onWeights = *algorithm->as<ActsOnWeights>();
          onWeights.useModel(context);
          EXPECT_EQ(onWeights.gradientScope() == GradientScope::kHost, hierarchical);
        }
      },
      {"a", "a", "b"});
}

}  // namespace
}  // namespace bagua
