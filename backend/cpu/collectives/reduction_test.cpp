// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>

namespace bagua {
namespace {

using c10d::ReduceOp;

at::Tensor reduced(const at::Tensor& copies, int64_t count, const ReduceOp& op) {
  at::Tensor output = at::empty({copies.numel() / count}, copies.options());
  std::vector<const void*> parts;
  for (const auto& copy : copies.chunk(count)) parts.push_back(copy.const_data_ptr());
  reduction::reduceParts(parts, op, count, output);
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
  const GroupIdentity group;
  const ArgumentChecks checks("op", group);
  EXPECT_THROW(reduction::checkSupported(checks, ReduceOp::BAND, at::kFloat), c10::ValueError);
  EXPECT_THROW(reduction::checkSupported(checks, ReduceOp::MAX, at::kComplexFloat), c10::ValueError);
  EXPECT_THROW(reduction::checkSupported(checks, ReduceOp::AVG, at::kBool), c10::ValueError);
  EXPECT_THROW(reduction::checkSupported(checks, ReduceOp::SUM, at::kFloat8_e4m3fn), c10::TypeError);
  EXPECT_NO_THROW(reduction::checkSupported(checks, ReduceOp::BXOR, at::kBool));
}

}  // namespace
}  // namespace bagua
