// SPDX-License-Identifier: Apache-2.0
// KeepsState::stateBytes() is called from any thread, as a monitor does that polls handle.stats().
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

class StateBytes : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(OfWeights, StateBytes, ::testing::Values("low_precision_decentralized", "diloco", "local_sgd"),
                         [](const auto& it) { return it.param; });

TEST_P(StateBytes, MayBeAskedForWhileItIsMadeAndDropped) {
  const auto& info = AlgorithmRegistry::find(GetParam());
  testing::runRanks(2,
                    [&](Communicator& communicator) {
                      const at::NoGradGuard noGrad;
                      // Of two dtypes, so that there are several tensors at a time to be found half made.
                      std::vector<at::Tensor> weights;
                      for (int i = 0; i < 8; ++i)
                        weights.push_back(at::ones({7}, i % 2 == 0 ? at::kFloat : at::kDouble));
                      std::set<int64_t> before;
                      std::set<int64_t> seen;
                      for (int start = 0; start < 40; ++start) {
                        testing::ImmediateSteps context(communicator, weights);
                        const auto algorithm = info.create(Options(info.name, info.options, {}));
                        auto& onWeights = *algorithm->as<ActsOnWeights>();
                        const auto& keeps = *algorithm->as<KeepsState>();
                        onWeights.useModel(context);
                        std::atomic<bool> isOver = false;
                        std::thread monitor([&] {
                          while (!isOver) seen.insert(keeps.stateBytes());
                        });
                        for (int step = 0; step < 5; ++step) {
                          before.insert(keeps.stateBytes());
                          onWeights.beforeForward(context);
                          before.insert(keeps.stateBytes());
                          onWeights.synchronize(context);
                        }
                        isOver = true;
                        monitor.join();
                        before.insert(keeps.stateBytes());
                      }
                      for (const int64_t bytes : seen) EXPECT_TRUE(before.contains(bytes)) << bytes;
                    },
                    {"a", "b"});
}

}  // namespace
}  // namespace bagua
