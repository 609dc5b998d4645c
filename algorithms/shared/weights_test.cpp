// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

// Gradients may be sparse that the optimizer has not seen yet when an algorithm is removed.
TEST(Weights, SparseTensorsAreAveragedAsDenseOnesAre) {
  testing::runRanks(2, [](Communicator& communicator) {
    const at::NoGradGuard noGrad;
    const at::Tensor dense = at::full({3}, 1.0 + 2 * communicator.rank());
    const at::Tensor sparse = dense.to_sparse();
    const std::vector<at::Tensor> weights = {dense};
    testing::ImmediateSteps context(communicator, weights);
    averageTensors(context, {sparse, dense});
    EXPECT_TRUE(dense.eq(2).all().item<bool>()) << dense;
    EXPECT_TRUE(sparse.to_dense().eq(2).all().item<bool>()) << sparse.to_dense();
  });
}

}  // namespace
}  // namespace bagua
