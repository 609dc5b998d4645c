// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "backend/host/reduction.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using c10d::ReduceOp;

class HostCommunicatorOf : public ::testing::TestWithParam<int> {};

// Below and above the size where the way of reducing changes, and sizes that no rank count divides.
const std::vector<int64_t> kSizes = {0, 1, 2, 1000, 5003, 100003};

TEST_P(HostCommunicatorOf, AllReduceAddsInRankOrderOnEveryRank) {
  for (const int64_t numel : kSizes) {
    at::manual_seed(3);
    std::vector<at::Tensor> inputs;
    for (int rank = 0; rank < GetParam(); ++rank) inputs.push_back(at::randn({numel}));
    at::Tensor expected = inputs[0].clone();
    for (int rank = 1; rank < GetParam(); ++rank) expected += inputs[rank];
    testing::runRanks(GetParam(), [&](Communicator& communicator) {
      at::Tensor tensor = inputs[communicator.rank()].clone();
      communicator.allReduce(tensor, ReduceOp::SUM);
      EXPECT_TRUE(at::equal(tensor, expected)) << numel << " elements on rank " << communicator.rank();
    });
  }
}

TEST_P(HostCommunicatorOf, ReduceLeavesTheOtherRanksAlone) {
  testing::runRanks(GetParam(), [&](Communicator& communicator) {
    const int root = communicator.size() - 1;
    at::Tensor tensor = at::full({3001}, communicator.rank() + 1, at::kLong);
    communicator.reduce(tensor, root, ReduceOp::MAX);
    const int64_t expected = communicator.rank() == root ? communicator.size() : communicator.rank() + 1;
    EXPECT_TRUE(tensor.eq(expected).all().item<bool>());
  });
}

TEST_P(HostCommunicatorOf, ReduceScatterGivesEachRankItsPart) {
  testing::runRanks(GetParam(), [&](Communicator& communicator) {
    const int size = communicator.size();
    const at::Tensor input = at::arange(size * 5, at::kInt) * (communicator.rank() + 1);
    at::Tensor output = at::empty({5}, at::kInt);
    communicator.reduceScatter(output, input, ReduceOp::SUM);
    const at::Tensor expected =
        at::arange(communicator.rank() * 5, communicator.rank() * 5 + 5, at::kInt) * (size * (size + 1) / 2);
    EXPECT_TRUE(at::equal(output, expected));
  });
}

TEST_P(HostCommunicatorOf, UnevenAllToAllDeliversEveryPart) {
  testing::runRanks(GetParam(), [&](Communicator& communicator) {
    const int size = communicator.size();
    const int rank = communicator.rank();
    // Rank i sends i + j elements of value 10 i + j to rank j.
    std::vector<int64_t> inputSplits;
    std::vector<int64_t> outputSplits;
    std::vector<double> sent;
    std::vector<double> expected;
    for (int peer = 0; peer < size; ++peer) {
      inputSplits.push_back(rank + peer);
      outputSplits.push_back(rank + peer);
      sent.insert(sent.end(), rank + peer, 10 * rank + peer);
      expected.insert(expected.end(), rank + peer, 10 * peer + rank);
    }
    at::Tensor output = at::zeros({static_cast<int64_t>(expected.size())}, at::kDouble);
    communicator.allToAll(output, at::tensor(sent, at::kDouble), outputSplits, inputSplits);
    EXPECT_TRUE(at::equal(output, at::tensor(expected, at::kDouble)));
  });
}

TEST_P(HostCommunicatorOf, CountsTheBytesItSends) {
  testing::runRanks(GetParam(), [&](Communicator& communicator) {
    const int size = communicator.size();
    at::Tensor tensor = at::zeros({int64_t{size} * 12000});
    communicator.allReduce(tensor, ReduceOp::SUM);
    EXPECT_EQ(communicator.traffic().sentBytes(), int64_t{2} * (size - 1) * 12000 * 4);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostCommunicatorOf, ::testing::Values(1, 2, 3, 4));

at::Tensor reduced(const at::Tensor& copies, int64_t count, const ReduceOp& op) {
  at::Tensor output = at::empty({copies.numel() / count}, copies.options());
  reduction::reduceCopies(copies, count, op, output);
  return output;
}

TEST(Reduction, AveragesOfIntegersTruncateTowardsZero) {
  const at::Tensor copies = at::tensor({-3, 7, -4, 2}, at::kInt);
  EXPECT_TRUE(at::equal(reduced(copies, 2, ReduceOp::AVG), at::tensor({-3, 4}, at::kInt)));
}

TEST(Reduction, SixteenBitFloatsAreRoundedOnce) {
  // 2048 + 1 is 2048 in half precision, so that adding one by one would stay there.
  const at::Tensor copies = at::tensor({2048.0, 1.0, 1.0, 1.0, 1.0}, at::kDouble).to(at::kHalf);
  EXPECT_EQ(reduced(copies, 5, ReduceOp::SUM).item<float>(), 2052.0F);
}

TEST(Reduction, ANaNWinsInMinimumAndMaximum) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor copies = at::tensor({1.0F, nan, nan, 1.0F}, at::kFloat);
  EXPECT_TRUE(reduced(copies, 2, ReduceOp::MIN).isnan().all().item<bool>());
  EXPECT_TRUE(reduced(copies, 2, ReduceOp::MAX).isnan().all().item<bool>());
}

TEST(Reduction, BoolsAddAsOrAndMultiplyAsAnd) {
  const at::Tensor copies = at::tensor({1, 0, 1, 1}, at::kInt).to(at::kBool);
  EXPECT_TRUE(at::equal(reduced(copies, 2, ReduceOp::SUM), at::tensor({1, 1}, at::kInt).to(at::kBool)));
  EXPECT_TRUE(at::equal(reduced(copies, 2, ReduceOp::PRODUCT), at::tensor({1, 0}, at::kInt).to(at::kBool)));
}

TEST(Reduction, RefusesWhatHasNoMeaning) {
  EXPECT_THROW(reduction::checkSupported("op", ReduceOp::BAND, at::kFloat), c10::ValueError);
  EXPECT_THROW(reduction::checkSupported("op", ReduceOp::MAX, at::kComplexFloat), c10::ValueError);
  EXPECT_THROW(reduction::checkSupported("op", ReduceOp::AVG, at::kBool), c10::ValueError);
  EXPECT_THROW(reduction::checkSupported("op", ReduceOp::SUM, at::kFloat8_e4m3fn), c10::TypeError);
  EXPECT_NO_THROW(reduction::checkSupported("op", ReduceOp::BXOR, at::kBool));
}

}  // namespace
}  // namespace bagua
