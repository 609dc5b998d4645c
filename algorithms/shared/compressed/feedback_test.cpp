// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/feedback.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <tuple>

#include "tests/support/thread_ranks.h"

namespace bagua::compressed {
namespace {

// None of four ranks owns the same element in both orders of the two parameters.
Bucket bucketInOrder(const std::vector<int64_t>& positions) {
  Bucket bucket{.flat = at::zeros({64})};
  int64_t begin = 0;
  for (const int64_t position : positions) {
    const int64_t length = position == 0 ? 40 : 24;
    bucket.entries.push_back({position, bucket.flat.narrow(0, begin, length)});
    begin += length;
  }
  return bucket;
}

// A share counts as a part of the mean, which is divided by the number of ranks after the coding, or, where hosts have
// several ranks, before it.
TEST(Feedback, WhatAnOwnerOwesOfElementsThatOthersOwnNowIsInItsShareOnce) {
  constexpr int kRanks = 4;
  for (const auto& [hierarchical, average, factor] :
       {std::tuple(false, true, kRanks), {false, false, 1}, {true, true, 1}, {true, false, 1}}) {
    const MeanOptions options{.hierarchical = hierarchical, .average = average};
    testing::runRanks(kRanks,
                      [&options, expected = static_cast<float>(factor)](Communicator& communicator) {
                        Feedback feedback;
                        Coding coding;
                        feedback.beginBucket(0);
                        feedback.useFor(bucketInOrder({0, 1}), "4bit", options, communicator, coding);
                        // An error ends the other ranks too, which a return does not.
                        TORCH_CHECK(coding.owner.nextResidual.numel() == 16, coding.owner.nextResidual.numel());
                        coding.owner.nextResidual.fill_(1);
                        feedback.endBucket(at::zeros({1}));
                        Coding rebuilt;
                        feedback.beginBucket(1);
                        feedback.useFor(bucketInOrder({1, 0}), "4bit", options, communicator, rebuilt);
                        EXPECT_EQ(rebuilt.owner.residual.abs().max().item<float>(), 0);
                        EXPECT_EQ(rebuilt.sender.residual.max().item<float>(), expected);
                        EXPECT_EQ(rebuilt.sender.residual.sum().item<float>(), 16 * expected);
                      },
                      {"a", "a", "b", "b"});
  }
}

}  // namespace
}  // namespace bagua::compressed
