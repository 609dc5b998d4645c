// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/mean.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "tests/support/thread_ranks.h"

namespace bagua::compressed {
namespace {

TEST(ReduceToMean, IsTheSumWhereNoMeanIsAskedFor) {
  const std::vector<std::vector<std::string>> layouts = {{"a", "b"}, {"a", "a", "b", "b"}, {"a", "a", "a", "b"}};
  for (const auto& hosts : layouts) {
    for (const bool hierarchical : {false, true}) {
      for (const bool average : {false, true}) {
        testing::runRanks(
            static_cast<int>(hosts.size()),
            [&](Communicator& communicator) {
              // A constant is coded without an error to speak of.
              at::Tensor flat = at::full({1003}, 0.25);
              StageSeconds seconds;
              reduceToMean(flat, {.hierarchical = hierarchical, .average = average}, {}, seconds, communicator);
              const double expected = average ? 0.25 : 0.25 * static_cast<double>(hosts.size());
              EXPECT_TRUE(at::allclose(flat, at::full({1003}, expected), 1e-3, 0))
                  << flat[0] << ", hierarchical " << hierarchical << ", average " << average << ", " << hosts;
            },
            hosts);
      }
    }
  }
}

}  // namespace
}  // namespace bagua::compressed
