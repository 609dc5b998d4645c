// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/lone_communicator.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

TEST(QAdam, UpdatesMomentaOfEveryDtypeByItsRule) {
  const auto& info = AlgorithmRegistry::find("qadam");
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const auto algorithm = info.create(Options(info.name, info.options, {}));
    const at::Tensor momentum = at::full({6, 50}, 0.5, dtype);
    algorithm->as<UsesMomenta>()->useMomenta({{momentum, 0.9}});
    const at::Tensor flat = at::full({300}, 1, dtype);
    Bucket bucket{.flat = flat, .entries = {{0, flat.view({6, 50})}}};
    LoneCommunicator alone;
    algorithm->reduce(bucket, alone);
    // decay * momentum + (1 - decay) * gradient, in place of the gradient.
    EXPECT_TRUE(at::allclose(flat.to(at::kDouble), at::full({300}, 0.55, at::kDouble), 0, 2e-3)) << dtype;
    EXPECT_TRUE(momentum.eq(0.5).all().item<bool>()) << "the optimizer's own stays until its step";
  }
}

TEST(QAdam, KeepsResidualsOnlyWithErrorFeedback) {
  const auto& info = AlgorithmRegistry::find("qadam");
  for (const bool hasFeedback : {false, true}) {
    testing::runRanks(2, [&](Communicator& communicator) {
      const auto algorithm =
          info.create(Options(info.name, info.options, {{"hierarchical", false}, {"error_feedback", hasFeedback}}));
      algorithm->as<UsesMomenta>()->useMomenta({{at::full({6, 50}, 0.5), 0.9}});
      const at::Tensor flat = at::arange(300, at::kFloat);
      Bucket bucket{.flat = flat, .entries = {{0, flat.view({6, 50})}}};
      algorithm->reduce(bucket, communicator);
      EXPECT_EQ(algorithm->as<KeepsState>()->state().contains("sender.int8.0"), hasFeedback);
    });
  }
}

}  // namespace
}  // namespace bagua
