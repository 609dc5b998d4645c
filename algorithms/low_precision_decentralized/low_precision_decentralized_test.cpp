// SPDX-License-Identifier: Apache-2.0
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <string>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

// The ranks of a host own a parameter each, here, as the last comes first: only those that own it can see what is
// wrong with it, and one of them says so.
TEST(LowPrecisionDecentralized, OneOwnerOfALaneWarns) {
  constexpr int64_t kElements = 4096;
  constexpr int kRanks = 4;
  const auto& info = AlgorithmRegistry::find("low_precision_decentralized");
  for (const int64_t tailed : {0, 1}) {
    // The guard counts exchanges: it looks at the first two, however many steps lie between them.
    const int64_t interval = tailed == 1 ? 3 : 1;
    std::array<int64_t, kRanks> alarms{};
    ::testing::internal::CaptureStderr();
    testing::runRanks(
        kRanks,
        [&](Communicator& communicator) {
          const at::NoGradGuard noGrad;
          const std::vector<at::Tensor> weights = {at::zeros({kElements}), at::zeros({kElements})};
          testing::ImmediateSteps context(communicator, weights);
          const auto algorithm = info.create(Options(info.name, info.options, {{"communication_interval", interval}}));
          auto& onWeights = *algorithm->as<ActsOnWeights>();
          onWeights.useModel(context);
          for (int64_t step = 0; step <= 2 * interval; ++step) {
            onWeights.beforeForward(context);
            for (const auto& weight : weights) {
              auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
              weight.add_(at::randn({kElements}, generator));
            }
            weights[tailed].slice(0, 0, std::nullopt, 64).add_(1000);
            onWeights.afterStep(context);
          }
          alarms[communicator.rank()] = algorithm->as<IsGuarded>()->guard().report().alarms;
        },
        {"a", "a", "b", "b"});
    const std::string said = ::testing::internal::GetCapturedStderr();
    const std::string warning =
        "'parameter " + std::to_string(tailed) + "' at step " + std::to_string(interval) + ": coding with int8 loses ";
    EXPECT_NE(said.find(warning), std::string::npos) << said;
    EXPECT_EQ(said.find("bagua: "), said.rfind("bagua: ")) << said;
    EXPECT_EQ(alarms,
              tailed == 1 ? (std::array<int64_t, kRanks>{1, 0, 1, 0}) : (std::array<int64_t, kRanks>{0, 1, 0, 1}));
  }
}

// The ranks would else go on from differences to weights that nobody has any more, and be drawn apart by a step that
// moves nothing.
TEST(LowPrecisionDecentralized, AfterSynchronizeTheReplicasStartAgainFromTheCommonWeights) {
  const auto& info = AlgorithmRegistry::find("low_precision_decentralized");
  testing::runRanks(2,
                    [&](Communicator& communicator) {
                      const at::NoGradGuard noGrad;
                      const std::vector<at::Tensor> weights = {at::full({5}, static_cast<float>(communicator.rank()))};
                      testing::ImmediateSteps context(communicator, weights);
                      const auto algorithm = info.create(Options(info.name, info.options, {}));
                      auto& onWeights = *algorithm->as<ActsOnWeights>();
                      onWeights.useModel(context);
                      onWeights.beforeForward(context);
                      onWeights.synchronize(context);
                      onWeights.beforeForward(context);
                      onWeights.afterStep(context);
                      EXPECT_TRUE(at::allclose(weights[0], at::full({5}, 0.5))) << weights[0];
                    },
                    {"a", "b"});
}

}  // namespace
}  // namespace bagua
